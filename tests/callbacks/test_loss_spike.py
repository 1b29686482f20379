"""LossSpikePolicy: an outlier leaves no trace in the weights, and every decision is recorded and repeatable."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import Tensor

from echelon import ModelCheckpoint
from echelon.callbacks import LossSpikePolicy
from echelon.common.errors import ConfigError


class Spiking(Scripted):
    """Multiplies the loss at the given global steps."""

    def __init__(self, spikes: dict[int, float]) -> None:
        super().__init__(lr=0.01)
        torch.manual_seed(0)
        self.net.reset_parameters()
        self.spikes = spikes
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights.append(self.net.weight.detach().clone())
        return super().training_step(batch, batch_idx) * self.spikes.get(self.global_step, 1.0)


def policy(**arguments: Any) -> LossSpikePolicy:
    return LossSpikePolicy(**{"warmup": 4, "threshold": 8.0, **arguments})


@pytest.mark.parametrize("factor", [1e3, float("nan"), float("inf")])
def test_a_spike_is_skipped_and_training_goes_on(tmp_path: Path, factor: float) -> None:
    module, spikes = Spiking({6: factor}), policy()
    trainer = trainer_in(tmp_path, spikes, max_epochs=3)
    trainer.fit(module, batches())
    assert torch.equal(module.weights[6], module.weights[7])
    assert not torch.equal(module.weights[7], module.weights[8])
    assert trainer.global_step == 12
    assert [(d["global_step"], d["epoch"], d["batch_idx"], d["action"]) for d in spikes.decisions] == [
        (6, 1, 2, "skip")
    ]


def test_a_spike_leaves_the_optimizer_as_if_there_had_been_no_step(tmp_path: Path) -> None:
    with_spike, without = Spiking({7: 1e3}), Spiking({})
    trainer_in(tmp_path, policy(), max_epochs=2).fit(with_spike, batches())
    trainer_in(tmp_path, policy(), max_steps=7).fit(without, batches())
    assert torch.equal(with_spike.net.weight, without.net.weight)


def test_a_spike_can_end_training_with_the_weights_before_it(tmp_path: Path) -> None:
    module, spikes = Spiking({6: 1e3}), policy(action="stop")
    trainer = trainer_in(tmp_path, spikes, max_epochs=3)
    trainer.fit(module, batches())
    assert trainer.global_step == 7
    assert torch.equal(module.net.weight, module.weights[6])
    assert spikes.decisions[0]["action"] == "stop"


def test_too_many_spikes_in_a_row_end_training(tmp_path: Path) -> None:
    spikes = policy(max_consecutive=3)
    trainer = trainer_in(tmp_path, spikes, max_epochs=5)
    trainer.fit(Spiking({5: 1e3, 7: 1e3, 8: 1e3, 9: 1e3}), batches())
    assert trainer.global_step == 10
    assert [d["action"] for d in spikes.decisions] == ["skip", "skip", "skip", "stop"]


def test_nothing_is_judged_while_warming_up_but_what_is_not_finite(tmp_path: Path) -> None:
    spikes = policy(warmup=10)
    trainer_in(tmp_path, spikes, max_epochs=2).fit(Spiking({3: 1e3, 5: float("nan")}), batches())
    assert [d["global_step"] for d in spikes.decisions] == [5]


def test_a_resumed_run_decides_the_same(tmp_path: Path) -> None:
    factors = {6: 1e3, 9: 1e3, 10: 2.0}
    whole, first, second = policy(), policy(), policy()
    module = Spiking(factors)
    trainer_in(tmp_path, whole, max_epochs=3).fit(module, batches())
    saving = ModelCheckpoint(tmp_path / "ckpt")
    trainer_in(tmp_path, first, saving, max_steps=7).fit(Spiking(factors), batches())
    resumed = Spiking(factors)
    trainer_in(tmp_path, second, max_epochs=3).fit(resumed, batches(), ckpt_path=saving.best_model_path)
    assert second.state_dict() == whole.state_dict()
    assert torch.equal(module.net.weight, resumed.net.weight)


def test_an_accumulated_step_is_judged_as_one(tmp_path: Path) -> None:
    module, spikes = Spiking({5: 1e3}), policy()
    trainer_in(tmp_path, spikes, max_epochs=4, accumulate_grad_batches=2).fit(module, batches())
    assert [d["global_step"] for d in spikes.decisions] == [5]
    assert spikes.decisions[0]["batch_idx"] == 3


class SpikingData(Spiking):
    """Multiplies the loss of the given batches of 2, counted over all epochs: data that spikes whenever it is read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.spikes = {self.global_step: self.factors.get(self.trainer.samples_seen // 2, 1.0)}
        return super().training_step(batch, batch_idx)

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__({})
        self.factors = factors

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": step, "interval": "step"}]


def fit_rolling_back(folder: Path, module: SpikingData, spikes: LossSpikePolicy, **fit: Any) -> Any:
    saving = ModelCheckpoint(folder / "ckpt", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_in(folder, spikes, saving, max_epochs=4)
    trainer.fit(module, batches(), **fit)
    return trainer


def test_a_rollback_goes_back_to_the_newest_checkpoint_and_skips_the_data_since(tmp_path: Path) -> None:
    module, spikes = SpikingData({7: 1e3}), policy(action="rollback")
    trainer = fit_rolling_back(tmp_path, module, spikes)
    assert torch.equal(module.weights[8], module.weights[6])
    assert not torch.equal(module.weights[9], module.weights[8])
    assert len(module.weights) == 16
    assert trainer.global_step == 16 - 2
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 14
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**14)
    assert [(d["global_step"], d["batch_idx"], d["action"]) for d in spikes.decisions] == [(7, 3, "rollback")]


def test_a_run_killed_after_a_rollback_rolls_back_again(tmp_path: Path) -> None:
    whole, again = policy(action="rollback"), policy(action="rollback")
    module, resumed = SpikingData({7: 1e3}), SpikingData({7: 1e3})
    fit_rolling_back(tmp_path / "whole", module, whole)
    checkpoint = tmp_path / "whole" / "ckpt" / "epoch=1-step=6.ckpt"
    fit_rolling_back(tmp_path / "resumed", resumed, again, ckpt_path=checkpoint)
    assert torch.equal(module.net.weight, resumed.net.weight)
    assert again.decisions == whole.decisions


def test_a_spike_before_the_first_checkpoint_is_only_left_out(tmp_path: Path, caplog: Any) -> None:
    module, spikes = SpikingData({5: 1e3}), policy(action="rollback")
    trainer = trainer_in(tmp_path, spikes, max_epochs=2)
    trainer.fit(module, batches())
    assert torch.equal(module.weights[6], module.weights[5])
    assert trainer.global_step == 8
    assert "no checkpoint to roll back to" in caplog.text


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Spiking):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.net.weight], 0.1), torch.optim.SGD([self.net.bias], 0.1)]

    with pytest.raises(ConfigError, match="LossSpikePolicy needs 1 optimizer, got 2"):
        trainer_in(tmp_path, policy(), max_epochs=1).fit(Two({}), batches())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "retreat"}, "action must be 'skip', 'stop' or 'rollback', got 'retreat'"),
        ({"threshold": 0.0}, "threshold must be a number of deviations > 0, got 0.0"),
        ({"window": 0}, "window must be 1 or more steps, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSpikePolicy(**arguments)
