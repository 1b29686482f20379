"""Snapshots in memory of real runs: what is read equals what was taken, on the same number of ranks and on others."""

from __future__ import annotations

import gc
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda, tensor_on
from programs import run_program
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, Trainer, TrainModule, seed_everything
from echelon.common.errors import CheckpointError
from echelon.strategies.fsdp import FSDPStrategy
from echelon.strategies.snapshots.snapshots import MemorySnapshots, SnapshotCost
from echelon.strategies.state.lazy_tensor import OUTLINE
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import MemoryWriter, load, save, snapshot_writer, staging
from echelon.trainer.session.session import RestartableFit

STRATEGIES = ("ddp", "zero", "fsdp", "hsdp") if IS_SWEEP else ("zero", "fsdp", "hsdp")
STEPS = 3
"""That each round takes."""


class Deep(TrainModule):
    """Blocks that are units, a buffer that counts, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
        self.head: Any = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.blocks(x)), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class Supervised(Callback):
    """Acts like an elastic run: continues from what the nodes hold, and takes a snapshot at its last step."""

    def __init__(self, folder: Path, round: int, nodes: Sequence[int]) -> None:
        self.folder, self.round, self.nodes = folder, round, nodes
        self.outlines = 0

    def setup(self, trainer: Any, module: nn.Module, stage: str) -> None:
        strategy, session = trainer.strategy, trainer.session
        node = self.nodes[strategy.rank]
        snapshots = MemorySnapshots(self.folder / f"node-{node}", self.round, strategy.ranks.group, node)
        recovered = snapshots.agree()
        session.recovery = RestartableFit(0, MemoryWriter(snapshots))
        assert (recovered is None) == (self.round == 0)
        if recovered is not None:
            session.resumed_from, session.recovery.is_restarted = recovered.path, True
            self.outlines = len(list(recovered.path.glob(f"*{OUTLINE}")))

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step % STEPS == STEPS - 1:
            trainer.take_snapshot()  # an older one
        if trainer.global_step % STEPS == 0:
            trainer.save_checkpoint(self.folder / "on-disk.ckpt")
            trainer.take_snapshot()


def strategy_of(name: str) -> Any:
    return {"fsdp": FSDPStrategy(), "hsdp": FSDPStrategy(replicate=2)}.get(name, name)


def fit(callbacks: list[Callback], max_steps: int, **settings: Any) -> dict[str, Tensor]:
    seed_everything(3)
    x = torch.randn(108, 5, generator=torch.Generator().manual_seed(1)).double()
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=12, shuffle=True)
    trainer = Trainer(
        max_steps=max_steps,
        callbacks=callbacks,
        global_batch_size=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **settings,
    )
    module = Deep()
    trainer.fit(module, data)
    strategy: Any = trainer.strategy
    return {name: value.clone() for name, value in strategy.full_model_state().items()}


def in_round(folder: str, round: int, nodes: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Train each strategy for some steps; return its weights, if this is its node's first rank, and more."""
    found: dict[str, Any] = {}
    for name in names:
        callback = Supervised(Path(folder) / name, round, nodes)
        steps = STEPS * (round + 1)
        weights = fit([callback], steps, strategy=strategy_of(name), devices=len(nodes))
        found[name] = weights, callback.outlines
    return found


def same(one: Any, other: Any) -> bool:
    """Return whether two states are bitwise equal."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


def newest(folder: Path) -> Path:
    """Return the folder of the newer of two snapshots on a node."""
    slots = list((folder / "snapshots").iterdir())
    return max(slots, key=lambda slot: load(slot, parts=("loop",), verify=False)["loop"]["global_step"])


@pytest.mark.sweep
def test_state_goes_through_memory_to_other_numbers_of_ranks_and_nodes(memory_path: Path) -> None:
    rounds: list[tuple[Sequence[int], Sequence[str]]] = [
        ((0, 1, 2, 3), STRATEGIES),
        ((0, 1, 2, 3), STRATEGIES),
        ((1, 3), STRATEGIES),  # 1 has a copy of 0, and 3 one of 2
        ((3, 4, 4), [name for name in STRATEGIES if name != "hsdp"]),
    ]
    for number, (nodes, names) in enumerate(rounds if IS_SWEEP else rounds[:3]):
        for folder in memory_path.glob("*/node-*"):
            if int(folder.name.removeprefix("node-")) not in nodes:
                shutil.rmtree(folder)
        results = run_ranks(in_round, len(nodes), str(memory_path), number, nodes, names)
        undisturbed = fit([], STEPS * (number + 1))
        for name in names:
            for weights, outlines in (result[name] for result in results):
                assert all(torch.allclose(weights[key], undisturbed[key], rtol=0, atol=1e-12) for key in weights)
                # restarted unchanged, a rank reads its own shard, which its node has a copy of; others are outlines
                is_sharded = name in ("zero", "fsdp", "hsdp")
                assert bool(outlines) == (is_sharded and number == 1), (name, number, outlines)
            taken = load(newest(memory_path / name / f"node-{nodes[0]}"), parts=("loop", "rng"), verify=False)
            saved = load(memory_path / name / "on-disk.ckpt", parts=("loop", "rng"))
            for state in (taken, saved):
                del state["loop"]["seconds"]
            assert same(taken, saved)


def test_whichever_rank_is_killed_whenever_a_whole_snapshot_is_left(memory_path: Path) -> None:
    """Two nodes of three ranks; now and then one is lost as well. The program compares every tensor."""
    program = Path(__file__).with_name("killed_in_snapshot.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_program(program, memory_path, "8", folder=memory_path, environ=environ)
    assert done.returncode == 0, done.stderr
    steps = [int(word) for word in done.stdout.split()]
    assert steps[0] == 0
    assert steps[-1] > 3


def state_at(step: int, *, rows: int = 64) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((rows, 1000), float(step)), "half": torch.full((3,), step).bfloat16()},
        "optimizers": [{"state": {"a": {"exp_avg": torch.full((1000, rows), step).t()}}}],
        "loop": {"global_step": step, "rate": math.nan, "long": [0.1] * (step * 100)},
        "nothing": torch.empty(0, 5),
    }


def written(folder: Path) -> tuple[MemorySnapshots, MemoryWriter]:
    snapshots = MemorySnapshots(folder, 0)
    assert snapshots.agree() is None
    return snapshots, MemoryWriter(snapshots)


def test_a_snapshot_is_of_the_moment_and_costs_what_it_says(memory_path: Path) -> None:
    snapshots, writer = written(memory_path)
    assert snapshots.cost == SnapshotCost()
    for step in (1, 2, 3):
        state = state_at(step)
        writer.save(state, step, gathering=10.0)
        state["model"]["a"].fill_(-1)
        state["optimizers"][0]["state"]["a"]["exp_avg"].fill_(-1)
    writer.close()
    assert snapshots.cost is not None
    assert snapshots.cost.gathering == 10.0
    assert 0.0 < snapshots.cost.writing < 10.0
    recovered = MemorySnapshots(memory_path, 1).agree()
    assert recovered is not None
    assert same(load(recovered.path, verify=False), state_at(3))
    assert len(list(snapshots.folder.iterdir())) == 1


def test_on_a_gpu_what_is_still_is_copied_beside_training_and_before_it_changes(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = PretendedCuda(is_late=True).install(monkeypatch)
    cuda.set_device("cuda:1")
    snapshots, writer = written(memory_path)
    for step in (1, 2, 3):
        on_gpu = {part: tensor_on(1, torch.full((100, 7), float(step))) for part in ("model", "optimizers")}
        state = {part: {"a": tensor} for part, tensor in on_gpu.items()}
        writer.save({**state, "loop": {"global_step": step}}, step, still=("optimizers",))
        on_gpu["model"].fill_(-1)  # such as a buffer, in forward
        writer.wait_for_copy()
        assert not writer.is_copying
        on_gpu["optimizers"].fill_(-1)
        writer.close()
        assert snapshots.cost is not None
        expected = {part: {"a": torch.full((100, 7), float(step))} for part in state}
        assert same(load(newest(memory_path), parts=tuple(state), verify=False), expected)
    assert ("wait", 1, 1) in cuda.log  # for what computes the state


def test_what_training_waits_for_is_a_cost_of_the_snapshot(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread copies no sooner than training waits for it."""
    cuda = PretendedCuda().install(monkeypatch)
    snapshots, writer = written(memory_path)
    waiting = threading.Event()

    def copy_when_waited_for(copies: Any, after: Any = None) -> None:
        if after is not None:
            assert waiting.wait(60)
            time.sleep(0.1)
        staging.copy_all(copies, after)

    monkeypatch.setattr(snapshot_writer, "copy_all", copy_when_waited_for)
    writer.save({"optimizers": {"a": tensor_on(0, torch.ones(3))}}, 1, still=("optimizers",))
    assert writer.is_copying
    assert snapshots.cost is None
    timer = threading.Timer(0.05, waiting.set)
    timer.start()
    writer.wait_for_copy()
    writer.close()
    timer.join()
    assert snapshots.cost is not None
    assert snapshots.cost.writing >= 0.1
    assert cuda.log


class LateWriter(MemoryWriter):
    """A writer whose copies are always under way, and which notes who waits for them."""

    def __init__(self, snapshots: MemorySnapshots, notes: list[str]) -> None:
        super().__init__(snapshots)
        self.notes = notes

    is_copying = True

    def save(self, *args: Any, still: Any = (), **options: Any) -> None:
        super().save(*args, still=still, **options)
        self.notes.append(f"save but {', '.join(sorted(still))}")

    def wait_for_copy(self) -> None:
        self.notes.append("wait")


class Noting(Callback):
    """Takes a snapshot after each step but the third, and notes what changes parameters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, list[str]()

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        snapshots = MemorySnapshots(self.folder, 0, trainer.strategy.ranks.group)
        snapshots.agree()
        trainer.session.recovery = RestartableFit(0, LateWriter(snapshots, self.notes))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.notes.append("step"))

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step != 3:
            trainer.take_snapshot()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.notes.append("end")


def test_nothing_changes_the_state_before_it_is_copied(memory_path: Path) -> None:
    noting = Noting(memory_path)
    fit([noting], 4)
    taken = ["save but optimizers", "wait"]  # the module has a buffer
    assert noting.notes == ["step", *taken, "step", *taken, "step", "step", *taken, "end"]


def test_nothing_grows_over_many_snapshots(memory_path: Path) -> None:
    gc.collect()  # trainers of other tests, and the files that they have mapped
    _, writer = written(memory_path)
    found = []
    for step in range(50):
        writer.save(state_at(10 + step % 2), step)
        writer.close()
        if step >= 10:
            blocks = sum(file.stat().st_blocks for file in memory_path.rglob("*"))
            maps = sum("/snapshots/" in line for line in Path("/proc/self/maps").read_text().splitlines())
            found.append((blocks, maps, len(os.listdir("/proc/self/fd"))))
    assert len(set(found)) == 1


def test_a_state_of_other_shapes_takes_other_files(memory_path: Path) -> None:
    _, writer = written(memory_path)
    sizes = []
    for step in range(9):
        state = state_at(step, rows=3 if step > 5 else 64)
        if step > 5:
            del state["nothing"]
        writer.save(state, step)
        writer.close()
        recovered = MemorySnapshots(memory_path, 1).agree() if step == 8 else None
        sizes.append(sum(file.stat().st_size for file in memory_path.rglob("*.safetensors")))
    assert recovered is not None
    assert same(load(recovered.path, verify=False), state)
    assert sizes[-2] < sizes[4] / 10
    assert not list(recovered.path.glob("nothing*"))


def test_what_cannot_be_taken_is_told_once_and_training_goes_on(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = written(memory_path)
    writer.save(state_at(1), 1)
    for step in (2, 3):
        writer.save({**state_at(step), "bad": object()}, step)
    writer.close()
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "is of type object" in told[0]
    writer.save(state_at(4), 4)
    writer.save({**state_at(5), "bad": object()}, 5)
    writer.close()
    recovered = MemorySnapshots(memory_path, 1).agree()
    assert recovered is not None
    assert recovered.step == 4
    assert same(load(recovered.path, verify=False), state_at(4))


def test_what_is_on_another_node_only_is_not_read_as_something_else(tmp_path: Path) -> None:
    whole = tmp_path / "a.ckpt" / "model.safetensors"
    save(tmp_path / "a.ckpt", {"model": {"a": torch.ones(4, 3)}})
    header = 8 + int.from_bytes(whole.read_bytes()[:8], "little")
    whole.with_name(whole.name + OUTLINE).write_bytes(whole.read_bytes()[:header])
    whole.unlink()
    found = load(tmp_path / "a.ckpt", lazy=("model",), verify=False)["model"]["a"]
    assert (found.shape, found.dtype) == ((4, 3), torch.float32)
    with pytest.raises(CheckpointError, match=r"A block of \[4, 3\] at \[0, 0\] of a stored tensor is on another node"):
        found.clone()
