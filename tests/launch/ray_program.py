"""A program that trains in Ray Train's workers, while nodes join and a worker dies.

Usage: ray_program.py FOLDER
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ModelCheckpoint, Trainer, TrainModule, seed_everything

MEMORY = 80 * 2**20
"""Bytes that a node of Ray has for objects; by default it is a third of the machine's memory."""


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02)


class Troubles(Callback):
    """Notes every step; one worker waits at step 4 until three replace it, and the last of these dies at step 8."""

    def on_train_step_end(self, trainer, module):
        folder, rank, world_size = Path(trainer.default_root_dir), trainer.strategy.rank, trainer.strategy.world_size
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{world_size} {trainer.global_step}\n")
        if world_size == 1 and trainer.global_step == 4:
            (folder / "waits").touch()
            threading.Event().wait()
        if world_size == 3 and rank == 2 and trainer.global_step == 8 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(job):
    """Continue in the folder, up to this many steps."""
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(61, 4, generator=generator, dtype=torch.float64)
    trainer = Trainer(
        strategy=job["strategy"],
        accelerator="cpu",
        precision="64-true",
        max_steps=job["steps"],
        global_batch_size=12,
        default_root_dir=job["folder"],
        logger=False,
        callbacks=[ModelCheckpoint(job["folder"], every_n_train_steps=1, save_last=True), *job["callbacks"]],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(x, torch.sin(x.sum(1, keepdim=True))), 12, shuffle=True)
    trainer.fit(Net(), data, ckpt_path="last")


def main(folder):
    """Train on one worker, and on three as soon as Ray has found room for them."""
    import ray
    import ray.cluster_utils
    import ray.train.torch

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head, connect=True)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder, "strategy": "fsdp", "steps": 12, "callbacks": [Troubles()]},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=0.2),
        run_config=ray.train.RunConfig(
            storage_path=folder, name="ray", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    try:
        with ThreadPoolExecutor() as executor:  # nodes can be started by the main thread only
            run = executor.submit(trainer.fit)
            while not (Path(folder) / "waits").exists() and not run.done():
                time.sleep(0.05)
            cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
            run.result()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
