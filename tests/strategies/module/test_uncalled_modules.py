"""Compiled modules: one warning where the step calls none of them, and no detour once they were called."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet
from torch import Tensor, nn

from echelon.strategies.torch_internals.modules import find_compiled_call

EAGER: dict[str, Any] = {"backend": "eager"}


class Bypassed(Regression):
    """Has a forward, and calls its network instead."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss


def test_a_step_that_calls_nothing_compiled_is_named_once():
    with pytest.warns(UserWarning, match=r"compiles Bypassed.forward, which the first step did not call") as found:
        quiet(compile=EAGER, max_epochs=2).fit(Bypassed(), loader())
    assert len([each for each in found if "compile=True" in str(each.message)]) == 1


def test_a_step_that_calls_what_is_compiled_is_not_named_and_later_calls_take_no_detour():
    module = Regression()
    with warnings.catch_warnings(action="error", category=UserWarning):
        quiet(compile=EAGER, max_epochs=1).fit(module, loader())
    assert type(find_compiled_call(module)).__name__ == "function"


def test_a_module_without_a_forward_compiles_what_it_calls():
    class Plain(Bypassed):
        forward = nn.Module.forward

    module = Plain()
    with warnings.catch_warnings(action="error", category=UserWarning):
        quiet(compile=EAGER, max_epochs=1).fit(module, loader())
    assert find_compiled_call(module.net) is not None
    assert torch.isfinite(module.net.weight).all()
