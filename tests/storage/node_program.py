"""The program of one process on one of two nodes: it trains in a folder of its own, from the last checkpoint.

Usage: node_program.py ROOT OUT STEPS [STRATEGY [RANKS_PER_NODE [CKPT_PATH]]]; prints where it was, and leaves its
weights in OUT/weights.pt. The variable OWN_DISK may name a folder that is to be ROOT for this process alone.
"""

import ctypes
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


def mount_own_disk(disk, root):
    """Have this process, and those that it starts, find a folder of its own at `root`."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare() exists only from Python 3.12 on
    new_mounts, bind, recursive, private = 0x20000, 0x1000, 0x4000, 0x40000
    done = (
        libc.unshare(new_mounts)
        or libc.mount(b"none", b"/", None, recursive | private, None)  # no mount spreads to the machine's own
        or libc.mount(os.fsencode(disk), os.fsencode(root), None, bind, None)
    )
    if done:
        raise OSError(ctypes.get_errno(), f"cannot mount {disk} at {root}")


if __name__ == "__main__":
    if "OWN_DISK" in os.environ:
        mount_own_disk(os.environ["OWN_DISK"], sys.argv[1])
    os.chdir(sys.argv[2])
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
