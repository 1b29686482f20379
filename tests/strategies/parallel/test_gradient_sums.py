"""Counts of targets travel with DDP's gradients: the sums are exact, and nothing else of a step changes by it."""

import itertools
from functools import partial

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from test_trained_set import KINDS, Model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from echelon import DDPStrategy, ZeroStrategy, seed_everything
from echelon.strategies.ddp import DDPOptions
from echelon.strategies.parallel.step_caller import GradientSums, StepCaller
from echelon.testing import run_ranks


class Line(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.net = nn.Linear(3, 2, dtype=dtype)

    def training_step(self, rows):
        return self.net(rows).square().sum()


def sums_on_a_rank(dtype, options):
    """Return what DDP added up in each of some steps, whether before or behind the backward, and the gradients."""
    calm_down()
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model, sums = Line(dtype), GradientSums(dtype, ranks)
    wrapped = DistributedDataParallel(StepCaller(model, returns_tensors=False, sums=sums), **options)
    rows, found = torch.arange(6, dtype=dtype).reshape(2, 3) * (rank + 1), []
    for numbers in ([1.0, 0.0, 0.0], [131071.0 + rank, 1 / 3, float(rank == 1)], None, [7.0 * rank, 0.25, 0.0]):
        model.zero_grad()
        loss = wrapped("training_step", rows)
        total = None if numbers is None else sums.begin(numbers)
        loss.backward()
        sums.end_backward()
        found.append(None if total is None else total())
    torch.distributed.destroy_process_group()
    return found, model.net.weight.grad


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.float64)])
def test_sums_beside_gradients_are_exact(ranks, dtype):
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
        for found, gradient in run_ranks(sums_on_a_rank, ranks, dtype, options):
            first, large, none, last = found
            assert first == [ranks, 0.0, 0.0]
            assert (large[0], large[2]) == (131071 * ranks + sum(range(ranks)), 1.0)
            assert large[1] == pytest.approx(ranks / 3, rel=4 * torch.finfo(dtype).eps)
            assert none is None
            assert last == [7.0 * sum(range(ranks)), 0.25 * ranks, 0.0]
            torch.testing.assert_close(gradient, mean_gradient(ranks, dtype))


def mean_gradient(ranks, dtype):
    torch.manual_seed(0)
    model = Line(dtype)
    for rank in range(ranks):
        (model.training_step(torch.arange(6, dtype=dtype).reshape(2, 3) * (rank + 1)) / ranks).backward()
    return model.net.weight.grad


# --- in a fit ---------------------------------------------------------------------------------------------------------


class Classes(Model):
    """Its loss is a mean over targets, which are as many as the samples."""

    begins_frozen = False
    ignored = False

    def training_step(self, batch, batch_idx):
        rows, labels = batch
        logits = torch.cat([self.head(self.backbone(rows).tanh()), rows[:, :1]], 1)
        return F.cross_entropy(logits, labels if self.ignored else labels.clamp(0))


class Ignored(Classes):
    """Some targets do not count."""

    ignored = True


class OwnBackward(Classes):
    """Looks at the gradients of its own backward."""

    def backward(self, loss, *args, **kwargs):
        loss.backward()
        for parameter in self.parameters():
            parameter.grad /= 1 + parameter.grad.abs()


class TwoBackwards(Classes):
    """Adds gradients of another loss in a hook."""

    def on_after_backward(self):
        self.trainer.strategy.placed.backward(1e-3 * sum(p.square().sum() for p in self.parameters()))


def fit_classes(kind, size=12, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    generator = torch.Generator().manual_seed(1)
    rows, labels = torch.randn(size, 3, generator=generator).double(), torch.arange(size) % 3 - 1
    labels[labels < 0] = -100
    data = TensorDataset(rows, labels)
    double_trainer(max_epochs=3, **settings).fit(module, DataLoader(data, 4 // world_size()))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


FITS = {
    "classes": (Classes, {}),
    "ignored": (Ignored, {}),
    "accumulated": (Ignored, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "uneven": (Ignored, {"size": 9}),
    "few": (Ignored, {"size": 13, "accumulate_grad_batches": 2}),
    "hook": (TwoBackwards, {}),
    "own": (OwnBackward, {}),
    "own, few": (OwnBackward, {"size": 9}),
    **{
        name: (type(kind.__name__, (kind, Ignored), {"begins_frozen": kind.begins_frozen}), {})
        for name, kind in KINDS.items()
    },
}
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero": ZeroStrategy,
    "copies": lambda: DDPStrategy(gradient_as_bucket_view=False, bucket_cap_mb=1e-5),
    "unused": lambda: DDPStrategy(find_unused_parameters=True),
    "static": lambda: ZeroStrategy(ddp=DDPOptions(static_graph=True)),
    "hook": lambda: DDPStrategy(comm_hook=(None, all_reduce_plainly)),
}
FITTED = [
    *itertools.product(["classes", "ignored", "accumulated", "uneven", "few"], STRATEGIES),
    *itertools.product(["hook", *KINDS], ["ddp", "copies"]),
    *itertools.product(["own", "own, few"], ["ddp", "zero"]),
]


def all_reduce_plainly(state, bucket):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.allreduce_hook(None, bucket)


def fit_all_classes():
    calm_down()
    return {
        (name, strategy): attempt(partial(fit_classes, kind, strategy=STRATEGIES[strategy](), **settings))
        for name, strategy in FITTED
        for kind, settings in [FITS[name]]
    }


@pytest.mark.filterwarnings("ignore:All 4 parameters:UserWarning")
def test_steps_whose_counts_travel_equal_one_process():
    expected = {name: fit_classes(kind, **settings) for name, (kind, settings) in FITS.items()}
    for found in run_ranks(fit_all_classes, 2):
        for (name, strategy), parameters in found.items():
            assert isinstance(parameters, dict), f"{name}, {strategy}: {parameters}"
            torch.testing.assert_close(
                parameters, expected[name], rtol=0, atol=1e-12, msg=f"{name}, {strategy}: {{}}".format
            )
