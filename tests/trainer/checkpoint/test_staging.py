"""Copies from devices wait for the right device, in any thread, and pin a bounded amount of memory."""

import threading

import pytest
import torch
from pretended_cuda import PretendedCuda, tensor_on

from echelon.trainer.checkpoint import AsyncWriter, load, staging


@pytest.fixture
def cuda(monkeypatch):
    return PretendedCuda().install(monkeypatch)


def test_a_thread_waits_for_the_device_of_the_tensors_and_not_for_its_own(cuda):
    cuda.set_device("cuda:1")
    copies = [(torch.empty(3), tensor_on(1, torch.arange(3.0))), (torch.empty(2), tensor_on(3, torch.ones(2)))]
    marks = staging.record_events(copies)
    thread = threading.Thread(target=staging.copy_all, args=(copies, marks))
    thread.start()
    thread.join()
    assert {index for _, *indices in cuda.log for index in indices} == {1, 3}
    assert ("wait", 1, 1) in cuda.log
    assert ("wait", 3, 3) in cuda.log
    assert [buffer.tolist() for buffer, _ in copies] == [[0, 1, 2], [1, 1]]


def test_a_checkpoint_of_another_device_is_whole_before_it_is_written(cuda, tmp_path):
    cuda.set_device("cuda:2")
    state = {"model": {"w": tensor_on(2, torch.arange(5.0))}, "optimizers": {"m": tensor_on(2, torch.ones(4))}}
    writer = AsyncWriter()
    writer.save(tmp_path / "a.ckpt", state, still=("optimizers",))
    writer.wait_for_copy()
    writer.close()
    assert {index for _, *indices in cuda.log for index in indices} == {2}
    saved = load(tmp_path / "a.ckpt")
    assert saved["model"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert saved["optimizers"]["m"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("chunk", [16, 64, 4096])
def test_tensors_of_any_size_pass_through_chunks_of_one_size(cuda, monkeypatch, chunk):
    monkeypatch.setattr(staging, "_CHUNK", chunk)
    tensors = [torch.randn(100), torch.tensor(3.0), torch.empty(0), torch.arange(7) > 3, torch.randn(5, 4).T]
    copies = [(torch.empty(tensor.shape, dtype=tensor.dtype), tensor_on(0, tensor)) for tensor in tensors]
    staging.copy_all(copies)
    for (buffer, _), tensor in zip(copies, tensors, strict=True):
        assert torch.equal(buffer, tensor)


def test_pinned_memory_is_bounded_whatever_the_size_of_the_state(cuda, monkeypatch):
    pinned = []
    plain = torch.empty

    def empty(*args, pin_memory=False, **options):
        tensor = plain(*args, **options)
        if pin_memory:
            pinned.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(staging, "_CHUNK", 1 << 10)
    staging.copy_all([(plain(1 << 14), tensor_on(0, torch.ones(1 << 14))) for _ in range(4)])
    assert sum(pinned) == 2 << 10


def test_where_nothing_can_be_pinned_the_copy_is_made_and_a_message_says_so(cuda, monkeypatch, caplog):
    plain = torch.empty

    def empty(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("out of pinned memory")
        return plain(*args, **options)

    buffer = plain(3)
    monkeypatch.setattr(torch, "empty", empty)
    staging.copy_all([(buffer, tensor_on(0, torch.arange(3.0)))])
    assert buffer.tolist() == [0, 1, 2]
    assert "out of pinned memory" in caplog.text
