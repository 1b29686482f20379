"""The program of one process of test_two_nodes.py: it trains with fsdp, in a folder of its own, with a root in a store.

Usage: node_program.py ROOT OUT STEPS; prints where it was, and leaves its weights in OUT/weights.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
from store_program import Net, data

from echelon import CSVLogger, ModelCheckpoint, Trainer, seed_everything


def main(root, out, steps):
    """Train from the last checkpoint, and print a line of JSON."""
    seed_everything(0)
    module = Net()
    seed_everything(0)
    trainer = Trainer(
        strategy="fsdp",
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=steps,
        max_epochs=-1,
        global_batch_size=4,
        default_root_dir=root,
        logger=CSVLogger(root),
        callbacks=ModelCheckpoint(every_n_train_steps=2, save_last=True),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path="last")
    weights = trainer.strategy.full_model_state()
    torch.save(weights, out / "weights.pt")
    found = {"rank": trainer.global_rank, "nodes": trainer.num_nodes, "step": trainer.global_step}
    print(json.dumps({**found, "dirpath": trainer.checkpoint_callback.dirpath, "log_dir": trainer.log_dir}))


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
