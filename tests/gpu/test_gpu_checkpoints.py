"""A checkpoint written while the device continues holds the state at the save, whatever the device's load."""

import shutil
from pathlib import Path

import pytest
import torch
from on_gpu import DEVICE, ON_CPU

from echelon.strategies.snapshots.snapshots import MemorySnapshots
from echelon.trainer.checkpoint import AsyncWriter, MemoryWriter, load

pytestmark = pytest.mark.gpu
NUM_NUMBERS = 1 << (12 if ON_CPU else 27)


@pytest.fixture
def folder(memory_path, tmp_path):
    """Return a folder with room for two states, in memory if there is: a container may have 64 MB of that."""
    room = shutil.disk_usage(memory_path).free
    return Path(memory_path if room > 10 * 4 * NUM_NUMBERS else tmp_path)


def busy(matrix, times=20):
    for _ in range(times):
        matrix = (matrix @ matrix).clamp(-1, 1)
    return matrix


def test_a_save_under_load_holds_the_state_of_its_step(folder):
    size = 64 if ON_CPU else 4096
    writer, matrix = AsyncWriter(), torch.randn(size, size, device=DEVICE)
    state = {str(index): torch.zeros(NUM_NUMBERS, device=DEVICE) for index in range(4)}
    path = folder / "a.ckpt"
    for step in range(1, 4):
        for tensor in state.values():
            tensor.fill_(step)
        matrix = busy(matrix)
        writer.save(path, {"optimizers": state}, still=("optimizers",))
        matrix = busy(matrix)
        writer.wait_for_copy()
        for tensor in state.values():
            tensor.fill_(-1)
        writer.close()
        saved = load(path)["optimizers"]
        assert all(bool((tensor == step).all()) for tensor in saved.values())


def test_a_snapshot_under_load_holds_the_state_of_its_step(folder):
    size = 64 if ON_CPU else 4096
    snapshots, matrix = MemorySnapshots(folder, 0), torch.randn(size, size, device=DEVICE)
    snapshots.agree()
    writer = MemoryWriter(snapshots)
    moments = {str(index): torch.zeros(NUM_NUMBERS, device=DEVICE) for index in range(2)}
    weights = {"w": torch.zeros(NUM_NUMBERS, device=DEVICE)}
    for step in range(1, 4):
        for tensor in (*moments.values(), *weights.values()):
            tensor.fill_(step)
        matrix = busy(matrix)
        writer.save({"model": weights, "optimizers": moments}, step, still=("optimizers",))
        weights["w"].fill_(-1)
        matrix = busy(matrix)
        writer.wait_for_copy()
        for tensor in moments.values():
            tensor.fill_(-1)
    writer.close()
    recovered = MemorySnapshots(folder, 1).agree()
    assert recovered is not None
    saved = load(recovered.path, verify=False)
    for tensor in (*saved["model"].values(), *saved["optimizers"].values()):
        assert bool((tensor == 3).all())
