"""From one process to many machines: the same training in five setups, with the same results to ten digits.

    1. one process    python examples/ddp.py
    2. two devices    python examples/ddp.py --strategy dp --devices 2
    3. two processes  python examples/ddp.py --strategy ddp --devices 2
    4. two nodes      MASTER_ADDR=127.0.0.1 NODE_RANK=0 python examples/ddp.py --strategy ddp --devices 1 --num-nodes 2
                      and the same with NODE_RANK=1 on the other node (or in another terminal)
    5. with restarts  echelon launch --nproc 2 --max-restarts 3 examples/ddp.py --run elastic --crash-at 100

In the last setup a process is killed halfway; all of them restart and resume from the newest checkpoint.
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


class DigitsData(echelon.DataModule):
    """The 1797 images of 8 x 8 pixels that come with scikit-learn: 1500 to train, 297 to validate.

    Neither number is a multiple of the batch size: the last batches are uneven, and every sample still counts.
    """

    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        self.train, self.val = (TensorDataset(images[part] / 16, labels[part]) for part in order.split([1500, 297]))

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class Digits(echelon.TrainModule):
    """Two layers, without dropout: each process draws its own random numbers, which would blur the comparison."""

    def __init__(self, width: int = 128, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).double().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Crash(echelon.Callback):
    """Kills the last process at a step, once, as an operating system that runs out of memory would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        is_last = trainer.strategy.rank == trainer.strategy.world_size - 1
        is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if trainer.global_step == self.step and is_last and is_first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, dp, ddp, ...")
    parser.add_argument("--devices", default="auto", help="how many on each node; left to the launcher if there is one")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--run", help="a folder for this run, which goes on there from its newest checkpoint")
    parser.add_argument("--crash-at", type=int, help="a step at which the last process is killed, once")
    options = parser.parse_args()

    echelon.seed_everything(1)
    module = Digits()
    trainer = echelon.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.max_epochs,
        global_batch_size=64,  # samples in a step, over all processes; without it, each process would get 64
        precision="64-true",  # so that rounding does not hide whether results are the same
        default_root_dir=options.run,
        callbacks=[] if options.crash_at is None else [Crash(options.crash_at)],
    )
    trainer.fit(module, datamodule=DigitsData(), ckpt_path=options.run and "last")

    # If `fit` started the processes, only the caller gets here; under a launcher every process does.
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"{trainer.global_step} steps: loss {metrics['val_loss']:.10f}, accuracy {metrics['val_accuracy']:.2%}")
