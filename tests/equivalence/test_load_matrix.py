"""Every layout resumes from any other layout's checkpoint, with optimizer and scheduler, as if nothing had stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from sweep import IS_SWEEP, dealt
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, ParallelStrategy, Strategy, Trainer, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import export, load_weights
from echelon.trainer.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all runs, a minute on two cores

GLOBAL_BATCH, PER_EPOCH = 8, 2
SAVED_AT, LAST = 1, 3
"""Optimizer steps; an epoch has two, so that runs stop in the middle of one, and go on in the next."""


@dataclass(frozen=True)
class Layout:
    """The placement of parameters and optimizer state during a run."""

    title: str
    processes: int
    make: Callable[[], Strategy | str]
    mesh: dict[str, int]
    """The mesh in the manifest."""
    shared: tuple[str, ...] = ()
    """The parts of a checkpoint to which every rank contributes."""
    sharing: int = 1
    """The number of processes that train on the same samples."""


BOTH = ("model", "optimizers")
# each of the parts that are packed side by side in a layer is cut
TP_PLAN = {
    "blocks.0.0": "packed_colwise:3",
    "blocks.0.2": "packed_rowwise:3",
    "blocks.1.0": "colwise",
    "blocks.1.2": "rowwise",
}
TP = partial(ParallelStrategy, tp=2, tp_plan=TP_PLAN)
IN_A_SWEEP = ("fsdp x 2", "replicate 2 x tp 2", "pp 2 x tp 2", "pp 2 x cp 2")
"""Layouts whose axes `make test` has in others."""
LAYOUTS = [
    Layout("single", 1, lambda: "single", {}),
    Layout("ddp x 2", 2, lambda: "ddp", {"dp_replicate": 2}),
    Layout("zero x 2", 2, lambda: "zero", {"dp_replicate": 2}, shared=("optimizers",)),
    Layout("ps x 2", 2, lambda: "ps", {"dp_replicate": 2}, shared=("optimizers",)),
    Layout("fsdp x 2", 2, FSDPStrategy, {"dp_shard": 2}, shared=BOTH),
    Layout("fsdp x 4", 4, FSDPStrategy, {"dp_shard": 4}, shared=BOTH),
    Layout("hsdp 2 x 2", 4, partial(FSDPStrategy, replicate=2), {"dp_replicate": 2, "dp_shard": 2}, shared=BOTH),
    Layout("tp x 2", 2, TP, {"tp": 2}, shared=BOTH, sharing=2),
    Layout("fsdp 2 x tp 2", 4, TP, {"dp_shard": 2, "tp": 2}, shared=BOTH, sharing=2),
    Layout("replicate 2 x tp 2", 4, partial(TP, dp_replicate=2), {"dp_replicate": 2, "tp": 2}, shared=BOTH, sharing=2),
    Layout("cp x 2", 2, partial(ParallelStrategy, cp=2), {"cp": 2}, shared=BOTH, sharing=2),
    Layout("pp x 2", 2, partial(ParallelStrategy, pp=2), {"pp": 2}, shared=BOTH, sharing=2),
    Layout("pp 2 x fsdp 2", 4, partial(ParallelStrategy, pp=2), {"pp": 2, "dp_shard": 2}, shared=BOTH, sharing=2),
    Layout("pp 2 x tp 2", 4, partial(TP, pp=2), {"pp": 2, "tp": 2}, shared=BOTH, sharing=4),
    Layout("pp 2 x cp 2", 4, partial(ParallelStrategy, pp=2, cp=2), {"pp": 2, "cp": 2}, shared=BOTH, sharing=4),
]
LAYOUTS = [layout for layout in LAYOUTS if IS_SWEEP or layout.title not in IN_A_SWEEP]
TITLES = [layout.title for layout in LAYOUTS]
BESIDE_STAGES = ("single", "zero x 2", "fsdp x 4", "fsdp 2 x tp 2")
"""Layouts of every kind that exchange checkpoints with layouts that have pipeline stages."""


STAGES = [title for title in TITLES if "pp" in title]
WITHOUT_STAGES = [title for title in TITLES if title not in STAGES]
PAIRS = [
    *dealt(WITHOUT_STAGES, WITHOUT_STAGES, (5,)),
    *dealt(STAGES, STAGES, (1,)),
    *dealt(STAGES, BESIDE_STAGES, (0,)),
    *((writer, reader) for reader, writer in dealt(STAGES, BESIDE_STAGES, (2,))),
]
"""Layouts that write, and others that are resumed from that: two with stages, two without, or one of each."""


class Residual(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + super().forward(x)
        return added


class Net(TrainModule):
    """Parameters with row counts that no number of ranks divides or fewer rows than ranks, tied or frozen; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        # torch warns about a fully_shard unit that returns a view, as a linear layer does for sequences
        self.blocks = nn.ModuleList(Residual(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh()) for _ in range(2))
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))

    def configure_pipeline(self, num_stages: int) -> list[list[str]]:
        return [["first", "blocks.0"], ["blocks.1", "frozen", "tied", "last"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.first(x * self.scale)
        for block in self.blocks:
            h = block(h)
        return nn.functional.mse_loss(self.last(self.frozen(h) + self.tied(x)), y)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "weight_decay": 0.1}, {"params": trained[3:], "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.03, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * LAST)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(layout: Layout, folder: Path, steps: int, ckpt_path: Path | None = None) -> dict[str, Tensor]:
    """Train, in one process of a layout, up to `steps` steps, saving in `folder`; return the final state and rates."""
    seed_everything(3, verbose=False)
    x = torch.randn(PER_EPOCH * GLOBAL_BATCH, 2, 5).double()
    trainer = Trainer(
        strategy=layout.make(),
        accelerator="cpu",
        devices=1 if layout.processes == 1 else "auto",
        precision="64-true",
        max_steps=steps,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=SAVED_AT, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size = (
        GLOBAL_BATCH * layout.sharing // layout.processes // (2 if "pp" in layout.mesh else 1)
    )  # micro-batches for stages
    loader = DataLoader(TensorDataset(x, x.sin().sum(-1, keepdim=True)), batch_size, shuffle=True)
    module = Net()
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    scheduler: Any = module.lr_schedulers()
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    assert trainer.global_step == steps
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups] + scheduler.get_last_lr())
    return {**trainer.strategy.full_model_state(), "rates": rates}


def write(layouts: list[Layout], root: Path) -> None:
    for layout in layouts:
        train(layout, root / layout.title, SAVED_AT)


def read_all(layouts: list[Layout], root: Path, scratch: Path) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Resume each of these layouts from every layout's checkpoint; return the final states by reader and writer."""
    return {
        reader.title: {
            writer: train(reader, scratch / reader.title / writer, LAST, checkpoint_of(writer, root))
            for writer in TITLES
            if (writer, reader.title) in PAIRS
        }
        for reader in layouts
    }


def checkpoint_of(title: str, root: Path) -> Path:
    return root / title / f"epoch=0-step={SAVED_AT}.ckpt"


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function for each number of processes, with the layouts of that number; return the results of rank 0."""
    found = []
    for number in sorted({layout.processes for layout in LAYOUTS}):
        layouts = [layout for layout in LAYOUTS if layout.processes == number]
        found.append(
            function(layouts, *args) if number == 1 else run_ranks(function, number, layouts, *args, timeout=1000)[0]
        )
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    on_ranks(write, root)
    return root


@pytest.fixture(scope="module")
def ends(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Tensor]]]:
    parts = on_ranks(read_all, saved, tmp_path_factory.mktemp("ends"))
    return {reader: end for part in parts for reader, end in part.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(LAYOUTS[0], tmp_path_factory.mktemp("undisturbed"), LAST)


@pytest.mark.sweep
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_layout_goes_on_from_what_another_has_saved_as_if_nothing_had_stopped(
    writer: str, reader: str, ends: dict[str, dict[str, dict[str, Tensor]]], undisturbed: dict[str, Tensor]
) -> None:
    end = ends[reader][writer]
    assert end.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        torch.testing.assert_close(end[name], expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=TITLES)
def test_a_checkpoint_holds_everything_once_and_each_rank_writes_its_part(layout: Layout, saved: Path) -> None:
    path, whole = checkpoint_of(layout.title, saved), checkpoint_of("single", saved)
    manifest, reference = read_manifest(path), read_manifest(whole)
    assert manifest.mesh == layout.mesh
    assert manifest.parameters == reference.parameters
    for part in ("model", "optimizers"):
        names = manifest.parts[part]
        number = layout.processes if part in layout.shared else 1
        by_rank: dict[str, Counter[str]] = {}
        for name in names:
            written = by_rank.setdefault(name.split(".")[0], Counter())
            written.update({n: t.numel() for n, t in load_file(path / name).items()})
        assert len(by_rank) == number
        sizes = reduce(add, by_rank.values())
        assert sizes == {n: t.numel() for n, t in load_file(whole / reference.parts[part][0]).items()}
        assert all(written.total() > sizes.total() / number / 4 for written in by_rank.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=TITLES)
def test_an_export_is_one_file_that_safetensors_loads(layout: Layout, saved: Path, tmp_path: Path) -> None:
    found = load_file(export(checkpoint_of(layout.title, saved), tmp_path))
    expected = load_file(export(checkpoint_of("single", saved), tmp_path / "single"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    module = Net()
    module.double()
    missing, unexpected = load_model(module, tmp_path / "model.safetensors", strict=False)
    assert not missing
    assert not unexpected


@pytest.mark.parametrize("layout", LAYOUTS, ids=TITLES)
def test_a_module_is_built_from_the_checkpoint_of_any_layout(layout: Layout, saved: Path) -> None:
    module = Net.load_from_checkpoint(checkpoint_of(layout.title, saved))
    expected = load_weights(checkpoint_of("single", saved))
    assert module.tied.weight is module.first.weight
    for name, value in module.state_dict().items():
        assert type(value) is Tensor
        torch.testing.assert_close(value, expected[name].float(), rtol=0, atol=1e-6)
