"""Submodules that a fit finds in eval mode: one warning names those whose mode matters and that are trained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from small import Regression, loader, quiet
from torch import nn

from echelon import ParallelStrategy
from echelon.testing import run_ranks


class Net(Regression):
    """Layers of which some compute something else in eval mode."""

    def __init__(self, hook: str = "") -> None:
        super().__init__()
        backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Dropout(0.0))
        self.net = nn.ModuleDict({"backbone": backbone, "head": nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.2))})
        self.hook = hook

    def forward(self, x: Any) -> Any:
        return self.net["head"](self.net["backbone"](x))

    def on_fit_start(self) -> None:
        if self.hook == "eval":
            self.net["backbone"].eval()

    def on_train_epoch_start(self) -> None:
        if self.hook == "train":
            self.train()


def warned(module: Net, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(max_epochs=2, **settings).fit(module, loader())
    return [str(each.message) for each in caught if "eval mode" in str(each.message)]


def test_modules_in_eval_mode_are_named_once_if_their_mode_matters() -> None:
    module = Net()
    module.net.eval()
    (text,) = warned(module)
    assert "Found 3 module(s) in eval mode at the start of training" in text
    names = "net.backbone.1 (BatchNorm1d), net.backbone.2 (Dropout), net.head.1 (Dropout)."
    assert names in text
    assert not module.net["backbone"][1].training


@pytest.mark.parametrize(
    "prepare",
    [
        Net,
        lambda: Net("eval"),
        lambda: freeze(Net()),
        lambda: put_to_eval(Net("train")),
        lambda: put_to_eval(Regression()),
    ],
    ids=["train mode", "eval in a hook", "frozen", "train in a hook", "no mode matters"],
)
def test_no_warning_where_the_mode_is_meant_or_does_not_matter(prepare: Any) -> None:
    assert warned(prepare()) == []


def put_to_eval(module: Any) -> Any:
    module.net.eval()
    return module


def freeze(module: Net) -> Net:
    module.net["backbone"].eval().requires_grad_(False)
    return module


def test_one_rank_warns_for_all_with_stages() -> None:
    found = run_ranks(warned_in_stages, 2, timeout=200)
    assert [len(texts) for texts in found] == [1, 0]
    assert "blocks.0.2 (Dropout), blocks.1.2 (Dropout)" in found[0][0]


class Staged(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.net  # registered before the blocks
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)))
        self.net = nn.Linear(2, 1)
        self.blocks.eval()

    def forward(self, x: Any) -> Any:
        return self.net(self.blocks(x))


def warned_in_stages() -> list[str]:
    return warned(Staged(), strategy=ParallelStrategy(pp=2), accumulate_grad_batches=2)  # type: ignore[arg-type]
