"""Parameters without a dimension (temperatures, logit scales) train under fsdp as in one process."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer, step_by_hand_on, world_size
from once import once
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import FSDPStrategy, ModelCheckpoint, TrainModule, load_weights, seed_everything
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import export

SAMPLES, GLOBAL_BATCH, EPOCHS = 17, 8, 2  # the third step of an epoch has one sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.layer(x))


class Scaled(TrainModule):
    """Has a number beside its layers, one in each block, one that is frozen and one that the first step alone uses."""

    def __init__(self, *, is_manual=False, optimizer=torch.optim.AdamW):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.early = nn.Parameter(torch.tensor(0.1))
        self.automatic_optimization, self.optimizer = not is_manual, optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.blocks(x) * self.logit_scale.exp() + self.frozen
        if self.trainer.global_step == 0:
            predicted = predicted + self.early
        loss = nn.functional.mse_loss(predicted, y)
        return step_by_hand_on(self, loss)

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Deferred(Scaled):
    """Builds its layers in the processes."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.blocks, self.logit_scale

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
            self.logit_scale = nn.Parameter(torch.full((), 0.7))


CASES = {
    "plain": ({}, {}, {}),
    "clipped": ({"gradient_clip_val": 0.01}, {}, {}),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}, {}),
    "accumulating": ({"accumulate_grad_batches": 2}, {}, {}),
    "reduced each time": ({"accumulate_grad_batches": 2}, {"sync_each_micro_batch": True}, {}),
    "by hand": ({}, {}, {"is_manual": True}),
    "agreeing": ({}, {"find_unused_parameters": True}, {}),
    "Adadelta": ({}, {}, {"optimizer": torch.optim.Adadelta}),
    "a custom optimizer": ({}, {}, {"optimizer": type("Own", (torch.optim.AdamW,), {})}),
    "deferred": ({}, {"deferred_init": True}, {}),
    "scaled losses": ({"precision": "16-mixed"}, {}, {}),
}
IN_A_SWEEP = ("clipped by value", "accumulating", "agreeing")
"""Cases that differ little from others."""
CASES = {name: case for name, case in CASES.items() if IS_SWEEP or name not in IN_A_SWEEP}
BOUND = {"scaled losses": 10.0}
"""The largest allowed difference, where it is not that of float64: in half precision, other steps overflow."""
RESUMED_FROM = {"plain": (0, 1), "by hand": (0,), "deferred": (0, 1)}
"""Whose checkpoints a case resumes from: those of as many processes (0), or of one."""
LAYOUTS = {"fsdp": (2, 1), "hsdp": (4, 2)}
IN_REPLICAS = CASES if IS_SWEEP else ("clipped", "reduced each time", "by hand")
"""The cases on four ranks."""
CELLS = [(layout, name) for layout in LAYOUTS for name in (IN_REPLICAS if layout == "hsdp" else CASES)]


def fit(folder, name, replicate, ckpt_path=None, **changed):
    """Train on all ranks, or alone; return the weights, in full, and the state of the optimizer of the checkpoint."""
    settings, options, of_module = CASES[name]
    seed_everything(3, verbose=False)
    module = (Deferred if name == "deferred" else Scaled)(**of_module)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if "precision" in settings else torch.float64
    x, y = (torch.randn(SAMPLES, size, generator=generator, dtype=dtype) for size in (4, 1))
    if not of_module.get("is_manual") and "accumulate_grad_batches" not in settings:
        settings = {"global_batch_size": GLOBAL_BATCH, **settings}
    trainer = double_trainer(
        **settings,
        strategy="single" if world_size() == 1 else FSDPStrategy(replicate=replicate, **options),
        max_epochs=EPOCHS,
        enable_checkpointing=name in RESUMED_FROM,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)] if name in RESUMED_FROM else [],
        default_root_dir=folder,
        **changed,
    )
    size = GLOBAL_BATCH // settings.get("accumulate_grad_batches", 1) // world_size()
    trainer.fit(module, DataLoader(TensorDataset(x, y), size, shuffle=True), ckpt_path=ckpt_path)
    return trainer.strategy.full_model_state()


def fit_all(folder, replicate):
    """Return the weights of each case, and those after a resume just before a step without samples."""
    calm_down()
    found = {}
    for name in IN_REPLICAS if replicate > 1 else CASES:
        place = Path(folder) / f"{name} {world_size()}"
        found[name] = fit(place, name, replicate)
        for number in RESUMED_FROM.get(name, ()) if world_size() > 1 else ():
            path = Path(folder) / f"{name} {number or world_size()}" / "epoch=0-step=2.ckpt"
            again = Path(folder) / f"{name} {world_size()} again"
            found[f"{name}, resumed from {number or world_size()}"] = fit(again, name, replicate, str(path))
        if world_size() > 1 and name == "plain" and found[name]:
            file = export(place / "epoch=1-step=6.ckpt", Path(folder) / "model.safetensors")
            found[f"{name}, exported"] = load_weights(file)
    return found


@pytest.fixture(scope="module")
def weights_of():
    folder = tempfile.mkdtemp()
    alone = once(lambda _: run_ranks(functools.partial(fit_all, folder, 1), 1)[0])

    def run(layout):
        processes, replicate = LAYOUTS[layout]
        return alone(""), run_ranks(functools.partial(fit_all, folder, replicate), processes)

    yield once(run)
    shutil.rmtree(folder)


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_numbers_train_as_in_one_process(weights_of, layout, name):
    alone, ranks = weights_of(layout)
    for rank in ranks:
        found = {key: state for key, state in rank.items() if key == name or key.startswith(f"{name}, ")}
        assert len(found) >= 1 + len(RESUMED_FROM.get(name, ()))
        for title, state in found.items():
            if not state:  # what only rank 0 keeps
                assert rank is not ranks[0]
                continue
            for key, value in alone[name].items():
                assert state[key].shape == value.shape
                difference = (state[key] - value).abs().max().item()
                assert difference <= BOUND.get(name, 1e-12), (title, key, difference)
