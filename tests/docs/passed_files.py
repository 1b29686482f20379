"""The files of Echelon that a batch passes on its way to `training_step`, and weights on theirs to a checkpoint.

A function is passed if an argument or its result is a tensor of the traced shape, or a list, dict or object of Echelon
that holds one. Listed are also the files of the functions that are running then: those that lead to the loader and to
`training_step`, or from `save_checkpoint` to what the weights pass. What runs around a whole fit, and hooks of
callbacks, are left out.

Usage: python tests/docs/passed_files.py; test_passed_files.py fails until docs/architecture.md has what is found.
"""

import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import torch
from rooms import PAGE, ROOT, page_with
from torch import Tensor, nn
from torch.utils.data import DataLoader

import echelon
from echelon.testing import run_ranks

ROOMS = tuple(f"{ROOT / name}/" for name in ("common", "strategies", "callbacks", "trainer"))
STARTS = ("strategies/launch/", "trainer/trainer.py", "trainer/runner.py", "trainer/fit.py")
"""What runs around the whole fit."""
WIDTH = 13
"""The last size of the tensors that are followed; no other tensor has it."""
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Tracer:
    """Notes the files of the functions that tensors of the traced width pass, while it is the profile function."""

    def __init__(self, *, with_callers):
        self.files, self._with_callers = set(), with_callers

    def __call__(self, frame, event, argument):
        name = file_of(frame)
        if name is None or event not in ("call", "return") or frame.f_code.co_name.startswith("on_"):
            return
        values = [argument] if event == "return" else list(frame.f_locals.values())
        if any(map(holds_traced, values)):
            self.files.add(name)
            if self._with_callers:
                self.files |= files_above(frame)


def file_of(frame):
    """Return the file of a frame, from the root of the package; None for one of another package."""
    path = frame.f_code.co_filename
    return path[len(str(ROOT)) + 1 :] if path.startswith(ROOMS) else None


def files_above(frame):
    """Return our files that have a frame on the stack, up to a hook of this file."""
    found = set()
    while frame is not None and frame.f_code.co_name != "on_train_end":
        found.add(file_of(frame))
        frame = frame.f_back
    return {name for name in found if name is not None}


def holds_traced(value, depth=0):
    """Return whether a value is a traced tensor, or holds one."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[-1] == WIDTH
    if isinstance(value, nn.Module | torch.optim.Optimizer | type) or depth == 3:
        return False
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif type(value).__module__.startswith("echelon.") and depth < 2:
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        inner = [vars(value).get(name) for name in vars(value)] if hasattr(value, "__dict__") else []
        inner += [getattr(value, name, None) for name in slots if isinstance(name, str) and name[:2] != "__"]
        inner = [each for each in inner if isinstance(each, Tensor | list | tuple)]
    else:
        return False
    return any(holds_traced(each, depth + 1) for each in inner)


class Net(echelon.TrainModule):
    """A chain of layers, all as wide as what is traced."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TracedBatch(echelon.TrainModule):
    """Notes in its third step what the batch has passed since the loader made it; no weight has its width."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.passed, self.tracer = set(), Tracer(with_callers=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def collate(self, samples):
        self.tracer = Tracer(with_callers=False)
        self.tracer.files |= files_above(sys._getframe())
        sys.setprofile(self.tracer)
        return torch.stack(samples)

    def training_step(self, batch, batch_idx):
        sys.setprofile(None)
        if self.global_step == 2:
            self.passed = self.tracer.files | files_above(sys._getframe())
        return self.layer(batch.mean(1, keepdim=True)).square().mean()


def without_starts(files):
    """Return the files in order, without those that run around the fit."""
    return sorted(name for name in files if not name.startswith(STARTS))


def step_as_rank():
    """Train steps, and return the files that a batch passed on this rank."""
    module = TracedBatch()
    loader = DataLoader(list(torch.ones(16, WIDTH)), batch_size=2, collate_fn=module.collate)
    settings = {**QUIET, "max_epochs": 1, "enable_checkpointing": False}
    echelon.Trainer(strategy="ddp", devices=2, **settings).fit(module, loader)
    return module.passed


def files_of_a_batch():
    """Return the files that a batch passes under ddp."""
    return without_starts(set().union(*run_ranks(step_as_rank, 2)))


def save_as_rank(folder):
    """Train a step, save a checkpoint, and return the files that the weights passed on this rank."""
    strategy = echelon.ParallelStrategy(pp=2, dp_shard=2)
    settings = {**QUIET, "max_steps": 1, "enable_checkpointing": False, "accumulate_grad_batches": 2}
    trainer = echelon.Trainer(strategy=strategy, devices=4, **settings)
    tracer, module = Tracer(with_callers=True), Net()

    class Saving(echelon.Callback):
        def on_train_end(self, trainer, module):
            threading.setprofile(tracer)
            sys.setprofile(tracer)
            trainer.save_checkpoint(Path(folder, "saved.ckpt"))
            sys.setprofile(None)
            threading.setprofile(None)

    trainer.callbacks.append(Saving())
    trainer.fit(module, DataLoader(list(torch.ones(16, WIDTH)), batch_size=2))
    return tracer.files


def files_of_a_save(folder):
    """Return the files that weights pass in a save under pp x fsdp, on any rank."""
    return without_starts(set().union(*run_ranks(partial(save_as_rank, str(folder)), 4)))


def page(folder):
    """Return the page as it should be."""
    rows = ["| | files |", "|---|---|"]
    for title, files in (
        ("a batch under ddp, from the loader to `training_step`", files_of_a_batch()),
        ("a save under pp x fsdp, from `save_checkpoint` to the disk", files_of_a_save(folder)),
    ):
        links = ", ".join(f"[{name}](../{name})" for name in files)
        rows.append(f"| {title} | {len(files)}: {links} |")
    return page_with("passed files", rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(scratch))
