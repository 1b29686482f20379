"""Names of accelerators mean what torch has; one that it does not know or find is refused, with what is there."""

import pytest
import torch

from echelon import ConfigError, Trainer
from echelon.strategies.devices.abilities import check_dtypes, widest_float
from echelon.strategies.devices.kinds import available_types, device_type_of, is_accelerator, known_types, num_devices
from echelon.strategies.devices.memory import memory_stats, peak_allocated
from echelon.strategies.devices.streams import has_streams, pins_memory


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_without_an_accelerator_the_cpu_is_taken(accelerator):
    assert device_type_of(accelerator) == "cpu"
    assert Trainer(accelerator=accelerator, devices=1, barebones=True).strategy is not None


@pytest.mark.parametrize("accelerator", ["cuda", "mps", "xpu"])
def test_a_device_that_is_not_here_is_refused(accelerator):
    with pytest.raises(ConfigError, match=f"accelerator='{accelerator}', but torch finds no such device.*'cpu' or 'au"):
        device_type_of(accelerator)


@pytest.mark.parametrize(
    ("accelerator", "package"), [("npu", "torch_npu"), ("hpu", "habana"), ("tpu", "torch_tpu"), ("musa", "torch_musa")]
)
def test_a_device_that_a_package_adds_to_torch_is_refused_with_the_package(accelerator, package):
    with pytest.raises(ConfigError, match=f"accelerator='{accelerator}'.*install {package}.*or use accelerator='cpu'"):
        device_type_of(accelerator)


def test_a_gpu_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="accelerator='gpu', but torch finds no GPU on this machine; use acc.*'cpu'"):
        device_type_of("gpu")


@pytest.mark.parametrize(("accelerator", "meant"), [("cudaa", "cuda"), ("xpuu", "xpu"), ("cpuu", "cpu")])
def test_an_unknown_name_is_refused_with_what_is_here(accelerator, meant):
    with pytest.raises(ConfigError, match=f"accelerator='{accelerator}' is not a known accel.*{meant}.*are: cpu"):
        Trainer(accelerator=accelerator)


def test_what_a_build_of_torch_knows_is_not_what_is_here():
    assert "cpu" not in [*known_types(), *available_types()]
    assert set(available_types()) <= set(known_types())
    assert [num_devices(name) > 0 for name in known_types()] == [name in available_types() for name in known_types()]


@pytest.mark.parametrize("name", ["cpu", "meta", "nonsense"])
def test_the_cpu_and_what_has_no_values_are_no_accelerators(name):
    assert not is_accelerator(name)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")])
def test_what_is_no_accelerator_has_no_streams_and_counts_nothing(device):
    assert not has_streams(device)
    assert not pins_memory(device)
    assert peak_allocated(device) == 0
    assert memory_stats(device) == {}
    assert widest_float(device) is torch.float64


def test_double_precision_is_refused_by_the_name_of_the_device_without_it():
    with pytest.raises(ConfigError, match="precision='64-true' needs float64, which accelerator='mps' does not have"):
        check_dtypes("mps", "64-true", torch.float64, None)
    check_dtypes("mps", "bf16-mixed", None, torch.bfloat16)
    check_dtypes("cpu", "64-true", torch.float64, None)
    assert widest_float(torch.device("mps")) is torch.float32
