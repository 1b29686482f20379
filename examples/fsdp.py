"""A GPT too large for one process: each process limits its own memory, and only shards of the model fit.

    python examples/fsdp.py                                   four processes, each with a quarter of everything
    python examples/fsdp.py --strategy single --devices 1     one process, which runs out of memory
    python examples/fsdp.py --strategy ddp                    four, each with the whole model: out of memory, too

Training takes 16 bytes per parameter: the parameter, its gradient and AdamW's two moments, in float32. With this
model's 25 million parameters that is 386 MiB; the limit is 300 MiB beyond what Python and torch have already taken.
"""

import argparse
import os
import resource
from pathlib import Path

import torch
from gpt import GPT, SourceData

import echelon


class LargeGPT(echelon.TrainModule):
    """The GPT of gpt.py, built in the processes that train it, each of which keeps only its shards."""

    def __init__(self, context: int = 64, width: int = 512, depth: int = 8, heads: int = 8, lr: float = 3e-4):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if not hasattr(self, "gpt"):  # called for each `fit`
            self.gpt = GPT(**self.hparams)

    def training_step(self, batch, batch_idx):
        loss = self.gpt.loss(batch)
        self.log("loss/train", loss.mean, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), fused=True)


class ShowPlan(echelon.Callback):
    """Prints how the module is sharded."""

    def on_fit_start(self, trainer, module):
        if trainer.is_global_zero:
            print(trainer.strategy.plan(module), flush=True)


class MemoryLimit(echelon.Callback):
    """Limits the memory of each process before the model is built, and prints at the end how much was taken."""

    def __init__(self, mebibytes: int = 300):
        self.mebibytes = mebibytes
        self.most = 0

    def setup(self, trainer, module, stage):
        self.before, self.limits = memory_taken(), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, ((self.before + self.mebibytes) * 2**20, self.limits[1]))

    def on_fit_end(self, trainer, module):
        # `fit` has saved a checkpoint and now returns the parameters to the caller, whose memory must hold them
        resource.setrlimit(resource.RLIMIT_DATA, self.limits)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.most = max(self.most, memory_taken() - self.before)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.most = max(self.most, memory_taken() - self.before)

    def on_train_end(self, trainer, module):
        most = trainer.strategy.all_gather_object(self.most)
        if trainer.is_global_zero:
            print(f"MiB taken by each process, of {self.mebibytes}: {most}")


def memory_taken():
    """Return the MiB of this process that count for RLIMIT_DATA: private memory, not mapped files."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--max-steps", type=int, default=10)
    options = parser.parse_args()

    # glibc keeps freed memory for later allocations; only blocks larger than this go back to the system
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    echelon.seed_everything(1)
    module = LargeGPT(width=options.width)
    callbacks = [MemoryLimit(), echelon.MemoryReport()]
    if options.strategy == "fsdp":
        callbacks.append(ShowPlan())
    trainer = echelon.Trainer(
        strategy=echelon.FSDPStrategy(deferred_init=True) if options.strategy == "fsdp" else options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        callbacks=callbacks,
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=SourceData(context=64, batch_size=1))
    print(f"Loss after {trainer.global_step} steps: {trainer.callback_metrics['loss/train']:.3f}")
