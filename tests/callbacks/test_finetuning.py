"""BackboneFinetuning and BaseFinetuning: Lightning's learning rates, resuming after unfreezing, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small import loader, quiet, raises
from torch import nn

from echelon import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint, ModuleError, TrainModule


class Transfer(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([one for one in self.parameters() if one.requires_grad], lr=0.08)


class Rates(Callback):
    """Notes the rates of all groups, and whether the backbone is trained, in each epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[float], bool]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen.append((rates, module.backbone[0].weight.requires_grad))


def fit(folder: Path, epochs: int, *callbacks: Callback, module: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    rates = Rates()
    finetuning = pickle.loads(pickle.dumps(BackboneFinetuning(unfreeze_backbone_at_epoch=2, train_bn=False)))
    settings = {"enable_checkpointing": bool(callbacks), "callbacks": [finetuning, rates, *callbacks]}
    trainer = quiet(folder, max_epochs=epochs, **settings)
    module = module or Transfer()
    trainer.fit(module, loader(), **options)
    return module, rates.seen


def test_the_backbone_is_unfrozen_at_its_epoch_and_its_rate_grows_to_that_of_the_head(tmp_path: Path) -> None:
    _, seen = fit(tmp_path, 7)
    # Lightning 2.6.6 with the same module and callback: the same rates
    expected = [([0.08], False)] * 2 + [([0.08, rate], True) for rate in (0.008, 0.016, 0.032, 0.064, 0.08)]
    assert [(pytest.approx(rates), trained) for rates, trained in expected] == seen


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_a_run_that_resumes_before_or_after_it_ends_with_the_same_weights(tmp_path: Path, epoch: int) -> None:
    whole, seen = fit(tmp_path / "whole", 5, ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1))
    checkpoint = next(tmp_path.glob(f"epoch={epoch}-*.ckpt"))
    resumed, later = fit(tmp_path / "resumed", 5, ckpt_path=checkpoint)
    assert later == seen[epoch + 1 :]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_step_inside_the_epoch_that_unfreezes_is_resumed(tmp_path: Path) -> None:
    whole, seen = fit(
        tmp_path / "whole",
        4,
        ModelCheckpoint(tmp_path, save_top_k=-1, monitor="step", mode="max", every_n_train_steps=5),
    )
    resumed, later = fit(tmp_path / "resumed", 4, ckpt_path=next(tmp_path.glob("*step=10.ckpt")))
    assert later == seen[2:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


class Gradual(BaseFinetuning):
    """Unfreezes a layer an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.backbone[:2]], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch < 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[1 - epoch], optimizer)


def test_layers_of_a_users_own_choice_are_unfrozen_one_after_the_other(tmp_path: Path) -> None:
    module = Transfer()
    first, norm = module.backbone[0].weight.clone(), module.backbone[1].weight.clone()
    trainer = quiet(tmp_path, max_epochs=1, callbacks=Gradual())
    trainer.fit(module, loader())
    assert torch.equal(module.backbone[0].weight, first)
    assert not torch.equal(module.backbone[1].weight, norm)
    assert module.backbone[1].track_running_stats
    optimizer = torch.optim.SGD([module.head.weight], lr=1.0)
    with pytest.warns(UserWarning, match="1 of 2 unfrozen parameters are already in SGD"):
        BaseFinetuning.unfreeze_and_add_param_group(module.head, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]


def test_what_cannot_be_fine_tuned_is_refused(tmp_path: Path) -> None:
    class NoBackbone(Transfer):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.backbone
            del self.backbone

    with raises(ModuleError, "BackboneFinetuning needs a module NoBackbone.backbone"):
        fit(tmp_path, 1, module=NoBackbone())
