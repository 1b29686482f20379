"""A drill: a run of which one worker is killed and another one stopped, and which ends with the numbers of ddp.py.

    python examples/elastic.py                  two workers that suffer the drill
    python examples/elastic.py --inner fsdp     the same, with shards of the model in each
    python examples/elastic.py --chaos ""       without faults; docs/chaos.md has other ones
    python examples/elastic.py --nodes 1:2 --rdzv 10.0.0.1:29500
                                                on one or two machines, which may come and leave: the same on each,
                                                with the address of the first

After a fault all workers start again, and go on from the newest snapshot in memory, or the newest checkpoint if that is
newer. In the end the program tells what became of each round, and of the time.
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
    """Writes down when which step was done by which process: into a file, which outlives the workers."""

    def on_train_step_end(self, trainer, module):
        if trainer.is_global_zero:
            with Path(trainer.log_dir, "steps.txt").open("a") as file:
                file.write(f"{time.time()} {trainer.global_step} {os.getpid()}\n")


def tell_pauses(folder):
    """Print how long the run stood still where other workers took over."""
    lines = [line.split() for line in Path(folder, "steps.txt").read_text().splitlines()]
    for (left, before, one), (resumed, step, other) in pairwise(lines):
        if one != other:
            lost = int(before) + 1 - int(step)
            print(f"Step {step} came {float(resumed) - float(left):.1f} s after step {before}: {lost} were done again.")


def tell_goodput(folder):
    """Print what became of each round and of the time; `echelon goodput FOLDER` shows more, and draws it."""
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
            snapshot_every=20,  # steps; by default as often as costs less than 1% of the time
            chaos=options.chaos,
        ),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.max_epochs,
        global_batch_size=64,  # of a step, however many workers there are
        precision="64-true",  # so that rounding does not hide what is the same
        callbacks=[Steps()],
    )
    trainer.fit(module, datamodule=DigitsData())

    # The program of each node comes here, once.
    if trainer.is_global_zero:
        tell_pauses(trainer.log_dir)
        tell_goodput(trainer.log_dir)
        metrics = trainer.callback_metrics
        print(f"{trainer.global_step} steps: loss {metrics['val_loss']:.10f}, accuracy {metrics['val_accuracy']:.2%}")
