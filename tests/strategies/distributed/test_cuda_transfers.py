"""GPU tensors are sent through the host: in pickles to other processes, and from rank to rank."""

import pytest
import torch
from torch import nn

from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.parcels import Parcel, list_slots
from echelon.strategies.distributed.pickling import pack_value, unpack_value
from echelon.strategies.distributed.point_to_point import Mailbox
from echelon.strategies.distributed.process_group import backend_options
from echelon.testing import run_ranks


@pytest.fixture
def on_gpu(monkeypatch):
    """Let storages say that they are on cuda:1 until somebody copies them to the CPU."""
    copied = []

    def cpu(storage):
        copied.append(storage.nbytes())
        other = torch.UntypedStorage(storage.nbytes())
        other.copy_(storage, False)
        other.is_on_cpu = True
        return other

    def device(storage):
        return torch.device("cpu" if hasattr(storage, "is_on_cpu") else "cuda:1")

    monkeypatch.setattr(torch.UntypedStorage, "cpu", cpu)
    monkeypatch.setattr(torch.UntypedStorage, "device", property(device))
    return copied


def test_tensors_on_a_gpu_are_packed_as_tensors_on_the_cpu(on_gpu, monkeypatch):
    module = nn.Linear(3, 2)
    module.weight.tag = "kept"
    payload = pack_value({"module": module, "logged": {"loss": torch.tensor(0.5)}})
    monkeypatch.undo()
    assert on_gpu == [24, 8, 4]
    found = unpack_value(payload)
    assert found["logged"]["loss"].device.type == "cpu"
    assert torch.equal(found["module"].weight, module.weight)
    assert isinstance(found["module"].weight, nn.Parameter)
    assert found["module"].weight.tag == "kept"


def exchanged():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()
    mailbox = Mailbox(dist.group.WORLD, torch.device("meta"))
    large = torch.ones(8 << 20)
    parcel = Parcel.pack({"gpu": large, "cpu": torch.arange(3)}, dist.get_rank())
    list_slots(parcel.skeleton)[0].is_cpu = False  # as for a tensor on a GPU
    parcel = Parcel(pack_value(parcel.skeleton), parcel.skeleton, parcel.tensors)
    sending = mailbox.send(parcel, other)
    received = mailbox.receive(other)
    sending.wait()
    later = mailbox.begin_receive(other)
    mailbox.send(parcel, other).wait()
    received_later = later.wait()
    return [(each["gpu"].device.type, each["cpu"].tolist(), len(each["gpu"])) for each in (received, received_later)]


def test_two_ranks_that_both_send_first_exchange_large_tensors_of_their_gpus():
    assert run_ranks(exchanged, 2) == [[("meta", [0, 1, 2], 8 << 20)] * 2] * 2


def test_nccl_has_gloo_beside_it_and_knows_its_device():
    device = torch.device("cuda", 3)
    assert backend_options("nccl", device) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    assert backend_options("gloo", torch.device("cpu")) == {"backend": "gloo"}
    assert Collectives(None, device).world_size == 1
