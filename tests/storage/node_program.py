"""The program of one process on one of two nodes: it trains in a folder of its own, from the last checkpoint.

Usage: node_program.py ROOT OUT STEPS [STRATEGY [RANKS_PER_NODE [CKPT_PATH]]]; prints where it was, and leaves its
weights in OUT/weights.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
from store_program import Net, data

from echelon import CSVLogger, ModelCheckpoint, Trainer, seed_everything


def main(root, out, steps, strategy="fsdp", devices=1, ckpt_path="last"):
    """Train from a checkpoint, and print a line of JSON."""
    seed_everything(0)
    module = Net()
    seed_everything(0)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        num_nodes=2,
        max_steps=steps,
        max_epochs=-1,
        global_batch_size=4,
        default_root_dir=root,
        logger=CSVLogger(root),
        callbacks=ModelCheckpoint(every_n_train_steps=2, save_last=True, monitor="step", mode="max", save_top_k=2),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    weights = trainer.strategy.full_model_state()
    torch.save(weights, out / "weights.pt")
    found = {"rank": trainer.global_rank, "nodes": trainer.num_nodes, "step": trainer.global_step}
    print(json.dumps({**found, "dirpath": trainer.checkpoint_callback.dirpath, "log_dir": trainer.log_dir}))


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
