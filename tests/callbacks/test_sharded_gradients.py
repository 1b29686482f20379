"""NaNGuard and LossSpikePolicy where each rank holds shards of gradients, some of them empty."""

import math

import pytest
import torch
from small import Regression, loader, quiet

from echelon import LossSpikePolicy, NaNGuard, seed_everything
from echelon.common.errors import NonFiniteError
from echelon.testing import run_ranks


class Noting(LossSpikePolicy):
    def __init__(self):
        super().__init__()
        self.noted = []

    def _numbers(self, trainer, gradients):
        self.noted.append(super()._numbers(trainer, gradients))
        return self.noted[-1]


def judged(strategy):
    """The bias has one element: with two ranks, the second one holds none of it."""
    seed_everything(1)
    policy = Noting()
    quiet(strategy=strategy, devices="auto", max_epochs=1, callbacks=[policy, NaNGuard()]).fit(
        Regression(), loader(8, 4 if strategy == "single" else 2, shuffle=False)
    )
    return policy.noted


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "ddp"])
def test_loss_and_norm_are_those_of_one_process(strategy):
    expected = judged("single")
    for noted in run_ranks(judged, 2, strategy):
        for numbers, alone in zip(noted, expected, strict=True):
            assert numbers == pytest.approx(alone, rel=1e-5)


class Breaking(Regression):
    def on_after_backward(self):
        for parameter in self.net.bias, self.net.weight:
            parameter.grad.to_local().fill_(math.nan)


def guarded():
    with pytest.raises(NonFiniteError, match=r"gradient of net\.weight, net\.bias is not finite"):
        quiet(strategy="fsdp", devices="auto", max_epochs=1, callbacks=[NaNGuard()]).fit(Breaking(), loader())
    return True


def test_sharded_gradients_that_are_not_finite_are_named_on_all_ranks():
    assert run_ranks(guarded, 2) == [True, True]
    assert torch.get_default_dtype() is torch.float32
