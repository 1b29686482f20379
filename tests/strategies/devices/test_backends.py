"""Backends of collectives are torch's for the type of device; one that cannot send from it is refused."""

import pytest
import torch
import torch.distributed as dist

from echelon import ConfigError
from echelon.strategies.devices.backends import backend_for, beside_gloo, check_several_processes, has_backend
from echelon.strategies.distributed.process_group import backend_options


def test_the_backend_is_torchs_for_the_device():
    assert backend_for("cpu") == "gloo"
    assert backend_for("cpu", "gloo") == "gloo"
    assert has_backend("cpu")
    assert not has_backend("meta")


@pytest.mark.parametrize(
    ("device_type", "given", "said"),
    [
        ("cpu", "nccl", "process_group_backend='nccl' needs GPUs, got accelerator='cpu'; use 'gloo'"),
        ("cpu", "glue", "process_group_backend='glue' is not known. Choose one of: gloo"),
        ("cpu", "fake", "process_group_backend='fake' is not known"),
        ("cpu", "mpi", "built without it; use 'gloo', which mpirun can start as well"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(device_type, given, said):
    if given == "nccl" and not dist.is_nccl_available():
        said = "built without it"
    if given == "mpi" and dist.is_mpi_available():
        pytest.skip("this build has MPI")
    with pytest.raises(ConfigError, match=said):
        backend_for(device_type, given)


def test_devices_without_collectives_are_refused_by_name():
    with pytest.raises(ConfigError, match="accelerator='mps' has one device and no backend for several processes"):
        check_several_processes("mps")
    with pytest.raises(ConfigError, match="accelerator='meta' has no backend.*nobody has registered one"):
        check_several_processes("meta")
    check_several_processes("cpu")


def test_a_backend_of_devices_only_has_gloo_beside_it_and_its_device():
    device = torch.device("cuda", 3)
    assert backend_options("nccl", device) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    assert backend_options("gloo", torch.device("cpu")) == {"backend": "gloo"}
    assert beside_gloo("nccl", "cuda") == "cpu:gloo,cuda:nccl"
    # torch could not make groups of gloo beside one that is bound to a device which gloo does not know
    assert backend_options("xccl", torch.device("xpu", 1)) == {"backend": "cpu:gloo,xpu:xccl"}
