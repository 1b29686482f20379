"""``strategy="auto"``: the ladder stops where a step fits, and a run trains with what was chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planned_modules import settings_of
from programs import run_program
from torch import nn
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule
from echelon.trainer.planning.auto import Choice, climb_ladder
from echelon.trainer.planning.machine import Machine

WIDTH, DEPTH, BATCH = 256, 32, 128
STATE = 4 * 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
"""Bytes of parameters, gradients and the two moments of Adam."""
KEPT = 4 * BATCH * WIDTH * DEPTH


class Tower(TrainModule):
    def __init__(self, width=WIDTH, reads=False):
        super().__init__()
        self.width, self.reads, self.blocks = width, reads, None

    def configure_model(self):
        width = self.width
        blocks = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
            for _ in range(DEPTH // 2)
        )
        self.blocks = self.blocks or nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        return loss if not self.reads or loss.item() < 10 else loss / 2

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def rows(width=WIDTH):
    batch = BATCH if width == WIDTH else 16
    return DataLoader(torch.randn(4 * batch, width), batch)


def climbed(memory, module=None, fits=None, **settings):
    module = module or Tower()

    def fit(strategy, callback, setting):
        if fits is not None:
            fits.append(setting is not None)
        own = settings_of(strategy=strategy, devices=1, max_steps=3, callbacks=[callback])
        Trainer(**own, activation_checkpointing=setting).fit(module, rows())

    return climb_ladder(fit, module, Machine(num_devices=4, memory=memory, is_cpu=True, margin=0.05), **settings)


@pytest.mark.parametrize(
    ("memory", "layout", "recomputes", "profiles"),
    [
        (1.45, "ddp", "", [False]),
        (1.0, "zero", "", [False]),
        (0.58, "fsdp", "", [False, True]),
        (0.48, "fsdp", "full", [False, True]),
        (0.4, "tp=4 with fsdp", "full", [False, True]),
    ],
)
def test_the_ladder_is_climbed_until_a_step_fits_and_no_profile_taken_before_a_rung_needs_it(
    memory, layout, recomputes, profiles
):
    fits = []
    choice = climbed(memory * STATE, fits=fits)
    assert fits == profiles  # by whether they recompute
    assert isinstance(choice, Choice), choice
    assert (choice.layout.name, choice.recomputes) == (layout, recomputes), choice.reason
    assert f"strategy='auto' takes {layout}" in choice.reason
    assert choice.num_micro_batches == (4 if "tp" in layout else 1)  # for the same global batch
    assert "of which less than" not in choice.reason


def test_replicas_of_a_module_with_unused_parameters_look_for_them():
    module = Tower()
    module.spare = nn.Linear(3, 3)
    choice = climbed(1.5 * STATE, module)
    assert choice.layout.name == "ddp"
    assert choice.layout.make().options.find_unused_parameters
    assert not climbed(1.5 * STATE).layout.make().options.find_unused_parameters


def test_what_fits_only_without_the_margin_is_taken_if_nothing_else_fits():
    choice = climbed(0.365 * STATE)
    assert isinstance(choice, Choice), choice
    assert choice.layout.name == "tp=4 with fsdp"
    assert "of which less than 5% stay free" in choice.reason


def test_what_does_not_fit_names_the_closest_layout_and_what_does():
    said = climbed(0.345 * STATE, fits=(fits := []))
    assert isinstance(said, str)
    assert fits == [False, True, True]  # the last one is of half a batch
    assert "the closest, tp=4 with fsdp with activation checkpointing, needs" in said
    assert f"; with batch_size={BATCH // 2} in the DataLoader and accumulate_grad_batches=8, for the same steps" in said
    assert climbed(1e6).endswith(" too much")


PROGRAM = """
import os, resource, sys
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)  # glibc keeps what was freed in smaller pieces
sys.path[:0] = {path!r}
from pathlib import Path
from echelon import Trainer
from test_auto import Tower, rows
import test_auto

if __name__ == "__main__":
    room = {room}
    if room:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
        limit = int(line.split()[1]) * 1024 + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    module = Tower(width={width}, reads={reads})
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(strategy="auto", accelerator="cpu", devices=2, max_steps=2, **quiet)
    trainer.fit(module, rows(width={width}))
    print(trainer.strategy.name, trainer.global_step, trainer.settings.strategy)
"""


def told(folder, *, room=0, **values):
    path = [str(Path(__file__).parent), *(str(folder) for folder in Path(__file__).parents[2].glob("helpers"))]
    (folder / "program.py").write_text(PROGRAM.format(path=path, room=room, **values))
    if not room:
        return run_program("program.py", folder=folder, timeout=300)
    # a forked program has memory of the tests' own at hand, and its workers are forked by a process without the limit
    command = [sys.executable, "program.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.only_in_sweep
def test_a_run_trains_with_what_was_chosen(tmp_path):
    width = 768
    state = 16 * DEPTH * (width * width + width)
    # the run's processes have the limit as well, and take more than tensors; the module here counts once
    done = told(tmp_path, room=int(0.85 * state + 150e6), width=width, reads=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strategy='auto' takes fsdp: " in done.stdout
    assert ", where zero needs " in done.stdout
    assert "; fsdp with activation checkpointing would take " in done.stdout
    assert done.stdout.splitlines()[-1] == "fsdp 2 auto"


@pytest.mark.only_in_sweep  # what it says is that of the ladder above
def test_a_run_that_fits_nowhere_says_so_before_it_starts(tmp_path):
    done = told(tmp_path, room=int(4e6 + 150e6), width=768, reads=False)
    assert done.returncode == 1
    assert "ConfigError: strategy='auto' finds no layout for 2 devices of " in done.stderr
    assert "the closest, " in done.stderr
    assert "Use more devices, or a smaller batch in the DataLoader." in done.stderr


def test_a_module_that_cannot_be_profiled_gets_ddp(tmp_path):
    done = told(tmp_path, width=64, reads=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strategy='auto'" not in done.stdout
    assert done.stdout.splitlines()[-1] == "ddp 2 auto"
