"""Nothing in a step waits for the device: a read from it would fail, on tensors without memory."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import NoRaces, fake_gpu
from pretended_cuda import PretendedCuda, tensor_on
from torch import nn
from torch.overrides import TorchFunctionMode

from echelon.callbacks.helpers.averaged_weights import AveragedWeights, ExponentialAverage
from echelon.strategies.distributed.nested import to_device
from echelon.strategies.module.loss_scaling import LossScaling
from echelon.strategies.parallel.replica import average_gradients
from echelon.strategies.state.dtensor import multiply_all
from echelon.trainer.data.transfer import SideStream
from echelon.trainer.loop.host_copy import HostCopy
from echelon.trainer.loop.loss_weights import Weights
from echelon.trainer.metrics import accumulator
from echelon.trainer.module.loss import Loss


def test_the_watch_sees_what_waits():
    with fake_gpu() as gpu:
        for wait in (torch.Tensor.item, torch.Tensor.cpu, bool):
            with pytest.raises(AssertionError, match="the device|waits for it"):
                wait(torch.ones((), device=gpu))


class Numbers:
    """The other rank of two, which has the same: numbers of the CPU arrive, and tensors stay where they are."""

    world_size = 2

    def __init__(self):
        self.reduced = []

    def all_reduce(self, data, op="sum"):
        self.reduced.append(data)
        if isinstance(data, list) and all(isinstance(value, float) for value in data):
            return [2 * value for value in data]
        if isinstance(data, torch.Tensor) and data.device.type == "cpu":
            return SimpleNamespace(tolist=lambda: [2, 0])
        return data


@pytest.mark.parametrize("ranks", [1, 2])
def test_counts_that_are_numbers_are_reduced_on_the_host(ranks):
    collectives = Numbers()
    ranks = SimpleNamespace(loss=collectives, count=collectives)
    strategy = SimpleNamespace(data_size=2, ranks=ranks, device=torch.device("cuda", 0))
    with fake_gpu() as gpu:
        weights = Weights(16, 2, strategy) if ranks == 2 else Weights(8, 2)
        for count in (3, 5):
            total = weights.weigh(Loss(torch.ones((), device=gpu, requires_grad=True), count), 4)
            assert total.device == gpu
        factor = weights.correction("Loss")
        assert isinstance(factor, float)
        multiply_all([torch.ones(3, device=gpu)], factor)
    assert factor == (16 / 16 if ranks == 2 else 3 / 8)


def test_counts_that_are_tensors_stay_on_the_device():
    ranks = SimpleNamespace(loss=Numbers(), count=Numbers())
    strategy = SimpleNamespace(data_size=2, ranks=ranks, device=torch.device("cuda", 0))
    with fake_gpu() as gpu:
        weights = Weights(16, 2, strategy)
        count = torch.full((), 3, device=gpu)
        weights.weigh(Loss(torch.ones((), device=gpu, requires_grad=True), count), 4)
        factor = weights.correction("Loss")
        assert factor.device == gpu
        gradients = [torch.ones(3, device=gpu), torch.ones(2, device=gpu, dtype=torch.bfloat16)]
        multiply_all(gradients, factor)


def test_a_factor_from_the_device_reaches_offloaded_gradients():
    with fake_gpu(NoRaces) as gpu:
        gradients = [torch.ones(3), torch.ones(2, device=gpu)]
        multiply_all(gradients, torch.full((), 0.5, device=gpu))
        assert [gradient.device.type for gradient in gradients] == ["cpu", "cuda"]


def test_factors_have_the_dtype_of_the_gradients():
    gradients = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    multiply_all(gradients, torch.tensor(1 / 3, dtype=torch.float64))
    assert [gradient.tolist() for gradient in gradients] == [
        [torch.tensor(1 / 3).item()] * 2,
        [1 / 3] * 2,
    ]


def test_metrics_are_folded_without_waiting(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with fake_gpu() as gpu:
        for reduce in ("mean", "sum", "max"):
            metric = accumulator.Accumulator(reduce)
            for index in range(2 * accumulator._FOLD_EVERY):
                metric.add(torch.ones((), device=gpu) if index % 2 else 1.0, 1.0)


def test_an_exponential_average_is_moved_without_waiting():
    with fake_gpu() as gpu:
        live, averaged = nn.BatchNorm1d(3, device=gpu), nn.BatchNorm1d(3, device=gpu)
        average = SimpleNamespace(_live=live, _model=SimpleNamespace(module=averaged))  # torch would copy the module
        AveragedWeights._update_exponentially(average, ExponentialAverage(0.9))


def test_an_average_on_the_host_is_moved_by_weights_that_have_arrived():
    with fake_gpu(NoRaces) as gpu:
        with pytest.raises(AssertionError, match="has not arrived"):
            torch.ones(3, device=gpu).to("cpu", non_blocking=True)
        ExponentialAverage(0.9)([torch.ones(3)], [torch.ones(3, device=gpu)])


def test_what_is_moved_to_the_host_has_arrived():
    with fake_gpu(NoRaces) as gpu:
        moved = to_device({"x": torch.ones(3, device=gpu)}, torch.device("cpu"))
        assert moved["x"].device.type == "cpu"


def test_an_exponential_average_is_torchs():
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    torch.manual_seed(0)
    weights = [torch.randn(5) for _ in range(3)]
    results = []
    for move in (get_ema_multi_avg_fn(0.9), ExponentialAverage(0.9)):
        averages = [torch.ones(5) for _ in weights]
        move(averages, weights, 3)
        results.append([average.tolist() for average in averages])
    assert results[0] == results[1]


def test_manual_optimization_asks_the_host_which_gradients_there_are():
    collectives = Numbers()
    with fake_gpu() as gpu:
        parameters = [nn.Parameter(torch.ones(2, device=gpu)) for _ in range(2)]
        parameters[0].grad = torch.ones(2, device=gpu)
        average_gradients(parameters, collectives)
        assert parameters[0].grad is not None
        assert parameters[1].grad is None
        assert collectives.reduced[0].device.type == "cpu"


# --- overflow of scaled gradients ------------------------------------------------------------------------------------


def scaled_steps(fused):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    reads = deque()

    class Counting(torch.amp.GradScaler):
        def get_scale(self):
            reads.append(None)
            return super().get_scale()

    scaling = LossScaling(Counting("cpu", init_scale=4.0, growth_interval=2), torch.device("cpu"))
    outcomes = []
    for gradient in (1.0, float("inf"), 2.0, 3.0):
        optimizer.zero_grad()
        scaling.scale((parameter * gradient).sum()).backward()
        scaling.unscale(optimizer)
        scaling.unscale(optimizer)
        scaling.step(optimizer)
        outcomes.append(scaling.end_step())
    return outcomes, parameter.tolist(), len(reads)


def test_an_update_that_was_left_out_is_known_without_reading_the_scale():
    outcomes, weights, reads = scaled_steps(fused=False)
    assert outcomes == [True, False, True, True]
    assert weights == [1 - 0.5 * 6] * 2
    assert reads == 0


def test_of_a_fused_optimizer_the_scale_is_read_once_a_step():
    outcomes, weights, reads = scaled_steps(fused=True)
    assert outcomes == [True, False, True, True]
    assert weights == [1 - 0.5 * 6] * 2
    assert reads == 1 + 4


class Copies(TorchFunctionMode):
    """Takes note of whether copies by ``Tensor.to`` are waited for."""

    def __init__(self):
        super().__init__()
        self.are_later = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.are_later.append(bool((kwargs or {}).get("non_blocking")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("device", "are_later"), [("cpu", True), ("cuda:0", False)])
def test_the_scale_is_waited_for_where_gradients_are_on_the_host(fused, device, are_later):
    """On a machine without a GPU torch's scaler makes the same copies, from the CPU to the CPU."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scaling = LossScaling(torch.amp.GradScaler("cpu", init_scale=4.0), torch.device(device))
    scaling.scale(parameter.sum()).backward()
    with Copies() as copies:
        scaling.unscale(optimizer)
        scaling.step(optimizer)
    assert any(copies.are_later) is are_later
    assert copies.are_later
    assert parameter.tolist() == [0.5, 0.5]


# --- copies to the device and from it --------------------------------------------------------------------------------


def test_a_batch_is_moved_on_a_stream_of_its_own_and_kept_until_it_was_used(monkeypatch):
    cuda = PretendedCuda().install(monkeypatch)
    cuda.set_device("cuda:1")
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.index))
    where = []

    def move(batch):
        where.append(cuda.stream_of_now)
        return [tensor_on(1, tensor) for tensor in batch]

    transfer = SideStream(move, torch.device("cuda", 1))
    moved = transfer([torch.ones(2), torch.zeros(3)])
    assert [tensor.device.index for tensor in moved] == [1, 1]
    assert where[0] is transfer._stream
    assert kept == [1, 1]
    assert ("wait for stream", 1, 1) in cuda.log


def test_what_is_moved_by_a_method_of_its_own_is_moved_where_it_is_used(monkeypatch):
    cuda = PretendedCuda().install(monkeypatch)

    class Graph:
        def to(self, device):
            return self

    graph = Graph()
    transfer = SideStream(lambda batch: batch, torch.device("cuda", 0))
    assert transfer([graph]) == [graph]
    assert cuda.log == []


def test_an_output_that_is_on_the_host_is_kept_as_it_is():
    output = {"a": torch.ones(2), "b": 3}
    copy = HostCopy(output)
    assert copy.output["a"] is output["a"]
    copy.finish()
    assert copy.output["b"] == 3
