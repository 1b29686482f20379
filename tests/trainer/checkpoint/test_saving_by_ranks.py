"""Several ranks write one checkpoint: each its part, completely or not at all, and all learn the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from echelon.common.errors import CheckpointError
from echelon.strategies.state.optimizer_state import Sharded
from echelon.trainer.checkpoint import AsyncWriter, SavingGroup, Writer, load, save, verify
from echelon.trainer.checkpoint.manifest import read_manifest

T = TypeVar("T")
NAMES = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]


def replicated(step: int) -> dict[str, Any]:
    return {
        "model": {name: torch.full((4, 2), float(step)) for name in NAMES},
        "optimizers": [{"state": {name: {"step": step} for name in NAMES}, "param_groups": [{"params": NAMES}]}],
        "loop": {"global_step": step},
    }


def dealt(step: int, rank: int, world_size: int, size: int = 10) -> dict[str, Any]:
    """Return what `rank` holds of a state whose optimizer entries are dealt to the ranks."""
    own = {
        name: {"step": torch.tensor(float(step)), "exp_avg": torch.full((size,), float(step + index))}
        for index, name in enumerate(NAMES)
        if index % world_size == rank
    }
    state = replicated(step)
    state["optimizers"] = [{"state": Sharded(own), "param_groups": [{"lr": 0.1, "params": NAMES}]}]
    return state


def on_ranks(
    world_size: int, function: Callable[[SavingGroup], T], timeout: float = 120.0
) -> list[T | CheckpointError]:
    """Call a function as every rank, in threads that share a store; return results, and errors of checkpoints."""
    store = HashStore()

    def run(rank: int) -> T | CheckpointError:
        try:
            return function(SavingGroup(store, rank, world_size, timedelta(seconds=timeout)))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def good(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.fixture(params=[Writer, AsyncWriter])
def kind(request: pytest.FixtureRequest) -> Callable[[SavingGroup], Writer]:
    made: Callable[[SavingGroup], Writer] = request.param
    return made


def test_entries_of_all_ranks_are_one_state(kind: Callable[[SavingGroup], Writer], tmp_path: Path) -> None:
    def run(ranks: SavingGroup) -> None:
        writer = kind(ranks)
        for step in (1, 2, 3):
            state = dealt(step, ranks.rank, ranks.world_size)
            writer.save(tmp_path / f"{step}.ckpt", state, still=("optimizers",))
            for values in state["optimizers"][0]["state"].values() if ranks.rank == 0 else ():
                writer.wait_for_copy()
                values["exp_avg"].fill_(-1)
        writer.close()
        assert not writer.has_failed

    good(on_ranks(4, run))
    for step in (1, 2, 3):
        path = tmp_path / f"{step}.ckpt"
        verify(path)
        loaded, whole = load(path), dealt(step, 0, 1)
        optimizer = loaded["optimizers"][0]
        assert set(optimizer["state"]) == set(NAMES)
        for index, name in enumerate(NAMES):
            assert (optimizer["state"][name]["exp_avg"] == step + index).all()
            assert torch.equal(loaded["model"][name], whole["model"][name])
        assert optimizer["param_groups"] == whole["optimizers"][0]["param_groups"]
        assert read_manifest(path).parameters == NAMES
        names = {file.name for file in path.iterdir()}
        parts = {f"optimizers-0000{rank}-of-00004.safetensors" for rank in (1, 2, 3, 4)}
        assert names == {"manifest.json", "state.json", "model.safetensors", *parts}
    assert {path.name for path in tmp_path.iterdir()} == {"1.ckpt", "2.ckpt", "3.ckpt"}


def test_the_state_of_many_ranks_is_that_of_one_except_for_its_files(tmp_path: Path) -> None:
    good(on_ranks(3, lambda ranks: Writer(ranks).save(tmp_path / "three.ckpt", dealt(5, ranks.rank, 3))))
    save(tmp_path / "one.ckpt", dealt(5, 0, 1))
    one, three = (json.loads((tmp_path / f"{name}.ckpt" / "state.json").read_bytes()) for name in ("one", "three"))
    assert one == three
    assert "optimizers.safetensors" in read_manifest(tmp_path / "one.ckpt").files


def test_rank_0_alone_writes_what_is_equal_on_all(tmp_path: Path) -> None:
    def run(ranks: SavingGroup) -> bool:
        writer = AsyncWriter(ranks)
        writer.save(tmp_path / "a.ckpt", replicated(ranks.rank))
        copies = bool(writer._buffers)
        writer.close()
        assert (tmp_path / "a.ckpt").is_dir()  # also on the ranks that wrote nothing
        return copies

    assert on_ranks(3, run) == [True, False, False]
    assert load(tmp_path / "a.ckpt")["loop"]["global_step"] == 0
    assert (tmp_path / "a.ckpt" / "optimizers.safetensors").exists() is False


def test_a_rank_without_entries_writes_no_file(tmp_path: Path) -> None:
    good(on_ranks(8, lambda ranks: Writer(ranks).save(tmp_path / "a.ckpt", dealt(1, ranks.rank, 8))))
    assert len(list((tmp_path / "a.ckpt").glob("optimizers-*"))) == len(NAMES)
    assert set(load(tmp_path / "a.ckpt")["optimizers"][0]["state"]) == set(NAMES)


def test_a_name_that_two_ranks_own_is_refused(tmp_path: Path) -> None:
    errors = on_ranks(2, lambda ranks: Writer(ranks).save(tmp_path / "a.ckpt", dealt(1, 0, 2)))
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "has the entry '0.weight' on rank 1" in str(errors[1])
    assert not list(tmp_path.iterdir())


def test_a_value_that_one_rank_cannot_save_fails_on_all(kind: Callable[[SavingGroup], Writer], tmp_path: Path) -> None:
    def run(ranks: SavingGroup) -> None:
        writer = kind(ranks)
        state = dealt(1, ranks.rank, 3)
        if ranks.rank == 2:
            state["optimizers"][0]["state"][NAMES[2]]["bad"] = object()
        writer.save(tmp_path / "a.ckpt", state)
        writer.close()

    errors = on_ranks(3, run)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "is of type object" in str(error)
    assert "(On rank 2 of 3.)" in str(errors[0])
    assert not list(tmp_path.iterdir())


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    save(tmp_path / "old.ckpt", replicated(0))

    def run(ranks: SavingGroup) -> None:
        if ranks.rank != 1:
            writer = AsyncWriter(ranks)
            writer.save(tmp_path / "new.ckpt", dealt(1, ranks.rank, 3))
            writer.close()

    errors = on_ranks(3, run, timeout=0.2)
    for error in (errors[0], errors[2]):
        assert "rank 1 of 3 has not reported" in str(error) or "rank 0 of 3 has not reported" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    verify(tmp_path / "old.ckpt")


def test_a_run_that_has_failed_does_not_wait_for_dead_ranks(tmp_path: Path) -> None:
    writer = AsyncWriter(SavingGroup(HashStore(), 0, 2, timedelta(hours=1), grace=timedelta(seconds=0.1)))
    writer.save(tmp_path / "a.ckpt", dealt(1, 0, 2))
    writer.abandon()
    with pytest.raises(CheckpointError, match="rank 1 of 2 has not reported that its tensors are written"):
        writer.close()
    assert not list(tmp_path.iterdir())


def save_two(writer: Writer, folder: Path, state: dict[str, Any]) -> None:
    """Either save may be the one that reports the failure of the first."""
    writer.save(folder / "taken.ckpt", state)
    writer.save(folder / "b.ckpt", state)


def test_writers_go_on_after_a_failure(kind: Callable[[SavingGroup], Writer], tmp_path: Path) -> None:
    (tmp_path / "taken.ckpt").write_text("a file in the way")

    def run(ranks: SavingGroup) -> None:
        writer = kind(ranks)
        with pytest.raises(CheckpointError, match=r"taken.ckpt exists and is not a checkpoint"):
            save_two(writer, tmp_path, dealt(1, ranks.rank, 2))
        writer.save(tmp_path / "c.ckpt", dealt(2, ranks.rank, 2))
        writer.close()

    good(on_ranks(2, run))
    verify(tmp_path / "c.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"taken.ckpt", "c.ckpt"}


def test_the_store_keeps_nothing_of_old_saves(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> None:
        writer = AsyncWriter(SavingGroup(store, rank, 2))
        for step in range(4):
            writer.save(tmp_path / f"{step}.ckpt", dealt(step, rank, 2))
            writer.save(tmp_path / f"{step}-too.ckpt", replicated(step))
        with pytest.raises(CheckpointError, match="is of type object"):
            writer.save(tmp_path / "bad.ckpt", {"bad": object()})
        writer.close()

    keys = store.num_keys()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert store.num_keys() - keys <= 2  # how many runs each rank has begun
    assert len(list(tmp_path.iterdir())) == 8


def test_a_rank_reads_from_the_disk_what_it_uses(tmp_path: Path) -> None:
    good(on_ranks(3, lambda ranks: Writer(ranks).save(tmp_path / "a.ckpt", dealt(1, ranks.rank, 3, 2_000_000))))
    before = resident()
    states = load(tmp_path / "a.ckpt", verify=False)["optimizers"][0]["state"]
    assert resident() - before < 4_000_000  # of 48 MB
    own = states[NAMES[0]]["exp_avg"].clone()
    assert own.numel() == 2_000_000
    assert resident() - before < 24_000_000


def resident() -> int:
    """Return how many bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
