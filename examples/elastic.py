"""A fault drill: one worker of the run is killed and another stopped, yet the results are those of ddp.py.

    python examples/elastic.py                  two workers that go through the drill
    python examples/elastic.py --inner fsdp     the same, with a shard of the model in each
    python examples/elastic.py --chaos ""       without faults; docs/chaos.md lists others
    python examples/elastic.py --nodes 1:2 --rdzv 10.0.0.1:29500
                                                on one or two machines, which may come and go: the same command on
                                                each, with the address of the first

After a fault all workers restart, and resume from the newest snapshot in memory, or from the newest checkpoint if that
is newer. At the end the program prints how each round ended, and where the time went.
"""

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

from ddp import Digits, DigitsData

import echelon

DRILL = "kill:rank=1@step=100, stop:rank=0@step=170"


class Steps(echelon.Callback):
    """Records when each step was done and by which process, in a file that outlives the workers."""

    def on_train_step_end(self, trainer, module):
        if trainer.is_global_zero:
            with Path(trainer.log_dir, "steps.txt").open("a") as file:
                file.write(f"{time.time()} {trainer.global_step} {os.getpid()}\n")


def tell_pauses(folder):
    """Print how long the run stood still each time other workers took over."""
    lines = [line.split() for line in Path(folder, "steps.txt").read_text().splitlines()]
    for (left, before, one), (resumed, step, other) in pairwise(lines):
        if one != other:
            lost = int(before) + 1 - int(step)
            print(f"Step {step} came {float(resumed) - float(left):.1f} s after step {before}: {lost} were done again.")


def tell_goodput(folder):
    """Print how each round ended and where the time went; `echelon goodput FOLDER` shows more, and draws it."""
    command = [sys.executable, "-m", "echelon", "goodput", folder, "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    for one in found["rounds"]:
        steps = f"steps {one['first_step'] + 1} to {one['last_step']}"
        cause = textwrap.shorten(one["cause"] or "Finished", 80, placeholder=" ...")
        print(f"Round {one['round']}, {one['world_size']} workers: {steps}. {cause}")
    shares = [(name.replace("_", " "), seconds / found["total_seconds"]) for name, seconds in found["seconds"].items()]
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    print(f"Goodput {found['goodput']:.0%} of {found['total_seconds']:.1f} s: {told}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="ddp", help="ddp, zero, fsdp or hsdp")
    parser.add_argument("--chaos", default=DRILL, help=f"what the run is to suffer; by default {DRILL!r}")
    parser.add_argument("--nodes", default="1", help="how many machines: a number, or MIN:MAX")
    parser.add_argument("--rdzv", help="where they meet: HOST:PORT")
    parser.add_argument("--devices", type=int, default=2, help="workers on this machine")
    parser.add_argument("--max-epochs", type=int, default=10)
    options = parser.parse_args()

    echelon.seed_everything(1)
    module = Digits()
    trainer = echelon.Trainer(
        strategy=echelon.ElasticStrategy(
            options.inner,
            nodes=options.nodes,
            rdzv=options.rdzv,
            snapshot_every=20,  # steps; by default as often as possible for less than 1% of the time
            chaos=options.chaos,
        ),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.max_epochs,
        global_batch_size=64,  # samples in a step, however many workers there are
        precision="64-true",  # so that rounding does not hide whether results are the same
        callbacks=[Steps()],
    )
    trainer.fit(module, datamodule=DigitsData())

    # Each node's program gets here, once.
    if trainer.is_global_zero:
        tell_pauses(trainer.log_dir)
        tell_goodput(trainer.log_dir)
        metrics = trainer.callback_metrics
        print(f"{trainer.global_step} steps: loss {metrics['val_loss']:.10f}, accuracy {metrics['val_accuracy']:.2%}")
