"""WeightAveraging, EMA and SWA: what is averaged, when the module holds it, and that it resumes exactly."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn

from echelon import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from echelon.common.errors import CheckpointError, ConfigError


class WithBatchNorm(Scripted):
    """Something with parameters, running statistics, and an attribute that cannot be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.lock = threading.Lock()


class Recorder(Callback):
    """Notes the state of the network after every step and epoch, and in the middle of every validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.epochs: list[dict[str, Tensor]] = []
        self.in_validation: list[dict[str, Tensor]] = []
        self.lrs: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(state_of(module))
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if len(self.in_validation) <= trainer.current_epoch:
            self.in_validation.append(state_of(module))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(state_of(module))


def state_of(module: Any) -> dict[str, Tensor]:
    return copy.deepcopy(module.net.state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: Any) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **{"rtol": 0.0, "atol": 0.0, **tolerance})


def fit(folder: Path, *callbacks: Callback, module: Scripted | None = None, **settings: Any) -> Any:
    """Fit 3 epochs of 4 steps, with a validation after each."""
    module = module or WithBatchNorm()
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = trainer_in(folder, *callbacks, **{"max_epochs": 3, **settings})
    torch.manual_seed(1)
    trainer.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


def average_by_torch(states: list[dict[str, Tensor]], **kwargs: Any) -> dict[str, Tensor]:
    """The average that AveragedModel computes from the network's states."""
    net = WithBatchNorm().net
    net.load_state_dict(states[0])
    averaged = AveragedModel(net, use_buffers=True, **kwargs)
    for state in states:
        net.load_state_dict(state)
        averaged.update_parameters(net)
    return dict(averaged.module.state_dict())


FLOATS = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight", "3.bias"]


def floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name in FLOATS}


def test_the_average_is_torchs_average_of_every_step(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, EMAWeightAveraging(decay=0.7))
    expected = average_by_torch(record.steps, avg_fn=get_ema_avg_fn(0.7))
    assert_same(floats(expected), state_of(module), atol=1e-6)
    assert (state_of(module)["0.weight"] - record.steps[-1]["0.weight"]).abs().max() > 1e-3


def test_by_default_all_steps_weigh_alike(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, WeightAveraging())
    mean = {name: torch.stack([state[name] for state in record.steps]).mean(0) for name in FLOATS}
    assert_same(mean, state_of(module), atol=1e-6)


def test_validation_uses_the_average_and_training_does_not(tmp_path: Path) -> None:
    record, plain = Recorder(), Recorder()
    fit(tmp_path, record, EMAWeightAveraging(decay=0.7))
    fit(tmp_path, plain)
    for with_average, without in zip(record.steps, plain.steps, strict=True):
        assert_same(with_average, without)
    for epoch, state in enumerate(record.in_validation):
        expected = average_by_torch(record.steps[: 4 * epoch + 4], avg_fn=get_ema_avg_fn(0.7))
        assert_same(floats(expected), state, atol=1e-6)


def test_steps_are_chosen_by_the_policy(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=2))
    expected = average_by_torch([record.steps[3], record.steps[6], record.steps[9]], avg_fn=get_ema_avg_fn(0.5))
    assert_same(floats(expected), state_of(module), atol=1e-6)


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, WeightAveraging(), accumulate_grad_batches=2)
    mean = {name: torch.stack([state[name] for state in record.steps[1::2]]).mean(0) for name in FLOATS}
    assert_same(mean, state_of(module), atol=1e-6)


def test_buffers_can_be_left_to_the_module(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, EMAWeightAveraging(decay=0.7, use_buffers=False))
    assert torch.equal(state_of(module)["1.running_mean"], record.steps[-1]["1.running_mean"])
    assert not torch.equal(state_of(module)["0.weight"], record.steps[-1]["0.weight"])


def test_an_interrupted_validation_gives_the_weights_back(tmp_path: Path) -> None:
    class Failing(WithBatchNorm):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("stop here")

    record, module = Recorder(), Failing()
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, record, EMAWeightAveraging(decay=0.7), module=module)
    assert_same(state_of(module), record.steps[-1])


def test_a_checkpoint_holds_what_was_validated(tmp_path: Path) -> None:
    record = Recorder()
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1)
    module = fit(tmp_path, record, EMAWeightAveraging(decay=0.7), checkpoint)
    trainer = trainer_in(tmp_path, Recorder())
    trainer.validate(module, batches(), ckpt_path=str(tmp_path / "ckpt" / "epoch=1-step=8.ckpt"), verbose=False)
    assert_same(state_of(module), record.in_validation[1])


def test_weights_that_are_saved_alone_are_the_average_alone(tmp_path: Path) -> None:
    bare = ModelCheckpoint(tmp_path / "bare", save_weights_only=True)
    fit(tmp_path, EMAWeightAveraging(decay=0.7), bare, ModelCheckpoint(tmp_path / "full", every_n_epochs=3))
    assert (tmp_path / "full" / "epoch=2-step=12.ckpt" / "trained_weights.safetensors").exists()
    assert not (Path(bare.best_model_path) / "trained_weights.safetensors").exists()


@pytest.mark.parametrize("make", [lambda: EMAWeightAveraging(decay=0.7), lambda: StochasticWeightAveraging(0.05, 2, 2)])
@pytest.mark.parametrize("stop", ["epoch=0-step=4", "epoch=1-step=6", "epoch=1-step=8", "epoch=2-step=10"])
def test_a_resumed_run_ends_with_the_same_weights_bitwise(tmp_path: Path, make: Any, stop: str) -> None:
    saving = ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1, every_n_train_steps=2)
    whole = state_of(fit(tmp_path, make(), saving))
    resumed = fit(tmp_path, make(), ckpt_path=str(tmp_path / "ckpt" / f"{stop}.ckpt"))
    assert_same(whole, state_of(resumed))


def test_a_run_that_ended_inside_an_epoch_resumes_exactly(tmp_path: Path) -> None:
    whole = state_of(fit(tmp_path, StochasticWeightAveraging(0.05, 2, 2)))
    saving = ModelCheckpoint(tmp_path / "ckpt")
    fit(tmp_path, StochasticWeightAveraging(0.05, 2, 2), saving, max_steps=10)
    assert saving.best_model_path.endswith("epoch=2-step=10.ckpt")
    resumed = fit(tmp_path, StochasticWeightAveraging(0.05, 2, 2), ckpt_path=saving.best_model_path)
    assert_same(whole, state_of(resumed))


def test_a_checkpoint_without_an_average_begins_one(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1))
    record = Recorder()
    path = str(tmp_path / "ckpt" / "epoch=1-step=8.ckpt")
    module = fit(tmp_path, record, WeightAveraging(), ckpt_path=path)
    mean = {name: torch.stack([state[name] for state in record.steps]).mean(0) for name in FLOATS}
    assert_same(mean, state_of(module), atol=1e-6)


def test_an_average_of_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    class Normalised(Scripted):
        def __init__(self, *, has_statistics: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=has_statistics), nn.Linear(3, 1)
            )

    saving = ModelCheckpoint(tmp_path / "ckpt")
    fit(tmp_path, EMAWeightAveraging(use_buffers=False), saving, module=Normalised(has_statistics=False))
    other = Normalised(has_statistics=True)
    other.strict_loading = False
    with pytest.raises(CheckpointError, match=r"The saved average lacks net.1.running_mean.*resume with the module"):
        fit(tmp_path, EMAWeightAveraging(), module=other, ckpt_path=saving.best_model_path)


def test_the_module_may_hold_what_cannot_be_copied_and_tensors_under_two_names(tmp_path: Path) -> None:
    class Tied(WithBatchNorm):
        def __init__(self) -> None:
            super().__init__()
            self.same = self.net[0]

    saving = ModelCheckpoint(tmp_path / "ckpt")
    record = Recorder()
    module = fit(tmp_path, record, EMAWeightAveraging(decay=0.7), saving, module=Tied())
    again = fit(tmp_path, EMAWeightAveraging(decay=0.7), module=Tied(), ckpt_path=saving.best_model_path)
    assert again.same.weight is again.net[0].weight
    assert_same(state_of(module), state_of(again))
    trainer_in(tmp_path).validate(again, batches(), ckpt_path=saving.best_model_path, verbose=False)
    assert_same(state_of(again), record.in_validation[-1])


# --- SWA -------------------------------------------------------------------------------------------------------------


def test_swa_averages_the_ends_of_the_last_epochs(tmp_path: Path) -> None:
    record = Recorder()
    module = fit(tmp_path, record, StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=4)
    mean = {name: torch.stack([state[name] for state in record.epochs[1:]]).mean(0) for name in FLOATS}
    assert_same(mean, state_of(module), atol=1e-6)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("epochs", [0, 3])
def test_swa_anneals_the_learning_rate_as_torch_does(tmp_path: Path, strategy: Any, epochs: int) -> None:
    record = Recorder()
    swa = StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=epochs, annealing_strategy=strategy)
    fit(tmp_path, record, swa, max_epochs=6)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=epochs, anneal_strategy=strategy)
    expected = [0.1]
    for _ in range(5):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert record.lrs[::4] == pytest.approx(expected)


@pytest.mark.parametrize(("lrs", "expected"), [([0.02], [0.02, 0.02]), ([0.02, 0.04], [0.02, 0.04, 0.5])])
def test_swa_goes_on_with_a_group_that_is_added_meanwhile(tmp_path: Path, lrs: Any, expected: Any) -> None:
    class Growing(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.lrs = [group["lr"] for group in trainer.optimizers[0].param_groups]

    class Grouped(Scripted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([self.net.weight], lr=0.1)
            if len(lrs) == 2:
                optimizer.add_param_group({"params": [self.net.bias]})
            return optimizer

    growing = Growing()
    swa = StochasticWeightAveraging(lrs, swa_epoch_start=2, annealing_epochs=0)
    fit(tmp_path, swa, growing, module=Grouped(), max_epochs=5)
    assert growing.lrs == expected


def test_swa_overrules_a_schedule_by_steps(tmp_path: Path) -> None:
    class Scheduled(WithBatchNorm):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Lrs(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.seen.append(optimizer.param_groups[0]["lr"])

    lrs = Lrs()
    fit(tmp_path, lrs, StochasticWeightAveraging(0.02, 2, annealing_epochs=0), module=Scheduled(), max_epochs=2)
    assert lrs.seen == pytest.approx([0.1, 0.05, 0.025, 0.0125, 0.02, 0.02, 0.02, 0.02])


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (EMAWeightAveraging, {"decay": 1.5}, "decay must be from 0 to 1, got 1.5"),
        (EMAWeightAveraging, {"update_every_n_steps": 0}, "update_every_n_steps must be 1 or more, got 0"),
        (WeightAveraging, {"avg_fn": max, "multi_avg_fn": max}, "avg_fn=.*cannot be combined"),
        (StochasticWeightAveraging, {"swa_lrs": 0.0}, "swa_lrs must be .*, got 0.0"),
        (StochasticWeightAveraging, {"swa_lrs": 0.1, "swa_epoch_start": 1.5}, "swa_epoch_start must be .*, got 1.5"),
        (StochasticWeightAveraging, {"swa_lrs": 0.1, "swa_epoch_start": 0}, "swa_epoch_start must be .*, got 0\\."),
        (
            StochasticWeightAveraging,
            {"swa_lrs": 0.1, "annealing_strategy": "sin"},
            "annealing_strategy must be 'cos' or 'linear', got 'sin'",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)


def test_a_fraction_of_unlimited_epochs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swa_epoch_start=0.8 is a fraction of max_epochs=-1"):
        fit(tmp_path, StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=4)
