"""A run that becomes NaN says so: at the first value that is logged, and when it ends; once, on rank 0."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from small import Regression, loader, quiet
from torch import nn

from echelon import CSVLogger, ModelCheckpoint
from echelon.testing import run_ranks


class Breaks(Regression):
    """A regression whose loss is NaN in the third step, and so are its weights from then on."""

    def __init__(self, at: int = 2) -> None:
        super().__init__()
        self.at = at
        self.mask = nn.Parameter(torch.full((1,), -math.inf), requires_grad=False)  # infinite on purpose

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss = loss * math.nan if self.global_step == self.at else loss
        self.log("train_loss", loss)
        return loss


def texts_of(folder: Path, module: Regression, batch_size: int = 2, **settings: Any) -> list[str]:
    """Return the warnings of a fit of six steps in this process."""
    silent: dict[str, Any] = {"max_steps": 6, "log_every_n_steps": 1, "logger": CSVLogger(folder)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet(folder, **{**silent, **settings}).fit(module, loader(12, batch_size))
    return [str(one.message) for one in told if issubclass(one.category, UserWarning)]


def test_the_first_nan_that_is_logged_and_weights_that_end_so_are_named_once(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    first, last = texts_of(tmp_path, Breaks(), callbacks=saving, enable_checkpointing=True)
    assert first.startswith("The loss is nan at global_step 3, and training goes on; add NaNGuard()")
    assert "ends at global_step 6 with weights that are not finite, such as 'net.weight'" in last
    assert "It was first seen at global_step 3, in the loss. The newest checkpoint" in last
    assert str(tmp_path / "saved" / "epoch=0-step=2.ckpt") in last


def test_nothing_is_said_of_finite_runs_and_weights_are_looked_at_though_nothing_is_logged(tmp_path: Path) -> None:
    assert texts_of(tmp_path, Breaks(at=-1)) == []
    [last] = texts_of(tmp_path, Breaks(), logger=False, log_every_n_steps=50)
    assert "weights that are not finite" in last


class Logs(Regression):
    """Logs a value that is infinite in some steps, beside a finite loss."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("grad_norm", math.inf if self.global_step in self.steps else 1.0)
        return super().training_step(batch, batch_idx)


def test_a_logged_value_is_named_and_one_of_a_step_that_16_mixed_may_skip_only_if_it_stays_so(tmp_path: Path) -> None:
    [text] = texts_of(tmp_path, Logs(1, 3))
    assert text.startswith("'grad_norm' is inf at global_step 2, and training goes on")
    assert texts_of(tmp_path, Logs(0, 2), precision="16-mixed") == []
    [text] = texts_of(tmp_path, Logs(2, 3), precision="16-mixed")
    assert text.startswith("'grad_norm' is inf at global_step 4")


STRATEGIES: list[tuple[str, dict[str, Any]]] = [("ddp", {}), ("fsdp", {}), ("zero", {}), ("local_sgd", {})]


def ranks_warn(folder: Path) -> dict[str, list[str]]:
    return {name: texts_of(folder / name, Breaks(), 1, strategy=name, **more) for name, more in STRATEGIES}


def test_one_rank_says_it_for_all_under_every_strategy(tmp_path: Path) -> None:
    first, second = run_ranks(ranks_warn, 2, tmp_path)
    assert [len(texts) for texts in first.values()] == [2] * len(STRATEGIES)
    assert all("weights that are not finite, such as 'net." in texts[1] for texts in first.values())
    assert not any(second.values())
