"""Training in Ray's workers: through a crash, and on as many workers as the cluster has room for.

    two workers       python examples/ray_train.py
    one to three      python examples/ray_train.py --workers 1:3      (as many as the cluster has CPUs for)
    with a crash      python examples/ray_train.py --crash-at 40
    without Ray       python examples/ray_train.py --workers 0

Each prints the same results to ten digits. Install Ray 2.51 or newer with `pip install "ray[train]"`.
"""

import argparse
import os
import signal
from pathlib import Path

from ddp import Digits, DigitsData

import echelon


class Crash(echelon.Callback):
    """Kills the last worker at a step, once, as an operating system that runs out of memory would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        has_crashed = Path(trainer.default_root_dir) / "has_crashed"
        is_last = trainer.strategy.rank == trainer.strategy.world_size - 1
        if trainer.global_step == self.step and is_last and not has_crashed.exists():
            has_crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(options):
    """Train in each worker, from where an earlier attempt stopped, whatever its number of workers."""
    echelon.seed_everything(1)
    trainer = echelon.Trainer(
        strategy=options["strategy"],
        accelerator="auto" if options["use_gpu"] else "cpu",
        max_epochs=options["max_epochs"],
        global_batch_size=64,  # samples in a step, over all workers, however many there are
        precision="64-true",  # so that rounding does not hide whether results are the same
        default_root_dir=options["run"],  # an absolute path, since each worker has its own working directory
        callbacks=[] if options["crash_at"] is None else [Crash(options["crash_at"])],
        enable_progress_bar=False,  # Ray prints only whole lines
    )
    trainer.fit(Digits(), datamodule=DigitsData(), ckpt_path="last")
    return {"steps": trainer.global_step, **{name: float(value) for name, value in trainer.callback_metrics.items()}}


def train_in_ray(options, num_workers):
    """Have Ray start this many workers, or a number in this range; return what the first worker returned."""
    import ray.train.torch  # pyright: ignore[reportMissingImports] - docs/ray.md says how to install it

    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=options["use_gpu"]),
        run_config=ray.train.RunConfig(
            storage_path=options["run"],
            name="ray",
            failure_config=ray.train.FailureConfig(max_failures=3),  # without it a crash ends the run
        ),
    )
    return trainer.fit().return_value


def workers(text):
    """Return 2 for "2" and (1, 3) for "1:3"."""
    numbers = tuple(map(int, text.split(":")))
    return numbers[0] if len(numbers) == 1 else numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=workers, default=2, help="how many, or from as many to as many: 1:3")
    parser.add_argument("--strategy", default="ddp", help="ddp, zero, fsdp, ...")
    parser.add_argument("--use-gpu", action="store_true", help="one for each worker")
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--run", default="ray_run", help="a folder that all nodes see; a run goes on in it")
    parser.add_argument("--crash-at", type=int, help="a step at which the last worker is killed, once")
    options = vars(parser.parse_args())

    num_workers = options.pop("workers")
    options["run"] = str(Path(options["run"]).absolute())
    if num_workers == 0:
        options["strategy"] = "auto"
    metrics = train_in_ray(options, num_workers) if num_workers else train(options)
    print(f"{metrics['steps']} steps: loss {metrics['val_loss']:.10f}, accuracy {metrics['val_accuracy']:.2%}")
