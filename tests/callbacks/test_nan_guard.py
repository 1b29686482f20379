"""NaNGuard: the first non-finite loss or gradient ends the run, with its name and place, and the weights intact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import Tensor, nn

from echelon import NaNGuard, NonFiniteError
from echelon.callbacks.nan_guard import _largest_magnitude


class Breaking(Scripted):
    """Multiplies the loss, or lets a gradient overflow, in one micro-batch of the second epoch."""

    def __init__(self, factor: float = 1.0, breaks_gradient: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.factor, self.breaks_gradient = factor, breaks_gradient
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights.append(self.net.weight.detach().clone())
        is_here = self.current_epoch == 1 and batch_idx == 2
        loss = super().training_step(batch, batch_idx)
        if is_here and self.breaks_gradient:
            return loss + (self.head.weight * 0).sqrt().sum() + self.head.bias.sum() * 0
        return loss * self.factor if is_here else loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_placed(tmp_path: Path, value: float) -> None:
    module = Breaking(value)
    with pytest.raises(NonFiniteError, match=rf"The loss is {value} at global_step 6 \(epoch 1, batch_idx 2\)"):
        trainer_in(tmp_path, NaNGuard(), max_epochs=3).fit(module, batches())
    assert torch.equal(module.net.weight, module.weights[6])


def test_a_run_after_one_that_broke_off_begins_again(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, NaNGuard(), max_epochs=3)
    with pytest.raises(NonFiniteError):
        trainer.fit(Breaking(float("nan")), batches())
    trainer.fit(Breaking(), batches())
    assert trainer.global_step == 12


def test_the_micro_batch_of_an_accumulated_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"The loss is nan at global_step 3 \(epoch 1, batch_idx 2\)"):
        trainer_in(tmp_path, NaNGuard(), max_epochs=3, accumulate_grad_batches=2).fit(Breaking(float("nan")), batches())


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    message = (
        r"The gradient of head.weight is not finite at global_step 6 \(epoch 1, batch_idx \[2\]\) although the loss is"
    )
    with pytest.raises(NonFiniteError, match=message):
        trainer_in(tmp_path, NaNGuard(), max_epochs=3).fit(Breaking(breaks_gradient=True), batches())


def test_an_overflow_of_scaled_gradients_is_left_to_the_scaler(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, NaNGuard(), max_epochs=3, precision="16-mixed")
    trainer.fit(Breaking(breaks_gradient=True), batches())
    assert trainer.global_step == 12
    with pytest.raises(NonFiniteError, match="The loss is nan at global_step 6"):
        trainer_in(tmp_path, NaNGuard(), max_epochs=3, precision="16-mixed").fit(Breaking(float("nan")), batches())


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, NaNGuard(), max_epochs=3)
    trainer.fit(Breaking(), batches())
    assert trainer.global_step == 12


def test_each_step_of_manual_optimization_is_checked(tmp_path: Path) -> None:
    class Manual(Breaking):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    with pytest.raises(NonFiniteError, match=r"The loss is nan at global_step 6 \(epoch 1, batch_idx 2\)"):
        trainer_in(tmp_path, NaNGuard(), max_epochs=3).fit(Manual(float("nan")), batches())


def test_large_but_finite_values_of_any_dtype_are_finite() -> None:
    large = torch.tensor([3e38, -3e38])
    wide = torch.tensor([1e300], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True)
    half = torch.tensor([6e4], dtype=torch.float16)
    assert _largest_magnitude([large, wide, sparse, half, torch.empty(0)]) == 1e300
    assert _largest_magnitude([torch.empty(0)]) is None
    broken = _largest_magnitude([torch.tensor([1.0, float("nan"), 2.0]), large])
    assert broken is not None
    assert broken != broken  # NaN
