"""A batch split over the devices of one process gives what one device gives for the whole batch."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchmetrics
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, Loss, ModuleError, TrainModule, seed_everything
from echelon.strategies import Hardware, Precision
from echelon.strategies.data_parallel import DataParallelStrategy


class Net(TrainModule):
    def __init__(self, optimizer="sgd", layer=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), layer or nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def samples(num_samples, dtype=torch.float64):
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)))


def trainer_on(devices, **settings):
    changed = {
        "strategy": DataParallelStrategy() if devices > 1 else "single",
        "devices": devices,
        "precision": "64-true",
        "max_epochs": 2,
    }
    return quiet(**{**changed, **settings})


def trained(module, devices, num_samples=41, batch_size=12, val_samples=0, dtype=torch.float64, **settings):
    """A new module, and the trainer after training it on this number of devices."""
    seed_everything(5)
    module, trainer = module(), trainer_on(devices, **settings)
    val_loader = DataLoader(samples(val_samples), batch_size) if val_samples else None
    trainer.fit(module, DataLoader(samples(num_samples, dtype), batch_size, shuffle=True), val_loader)
    return module, trainer


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


def assert_same_steps(module, devices, **settings):
    one, on_one = trained(module, 1, **settings)
    many, on_many = trained(module, devices, **settings)
    assert on_many.global_step == on_one.global_step >= 5
    torch.testing.assert_close(weights(many), weights(one), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_samples", [37, 41])  # the last batch of 37 is one sample, of 41 five
@pytest.mark.parametrize("devices", [2, 3])
def test_every_number_of_devices_takes_the_steps_of_one(devices, num_samples, optimizer, settings):
    epochs = {"max_epochs": 3} if "accumulate_grad_batches" in settings else {}
    assert_same_steps(lambda: Net(optimizer), devices, num_samples=num_samples, **settings, **epochs)


def test_a_step_may_return_a_mapping_and_part_of_a_batch_may_give_nothing():
    class Mapped(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if batch_idx == 1:
                return None
            pred = self(x)
            return {"loss": nn.functional.mse_loss(pred, y), "pred": pred.detach(), "none": None}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx != 1:
                assert outputs["pred"].shape == batch[1].shape
                expected = nn.functional.mse_loss(outputs["pred"], batch[1])
                torch.testing.assert_close(outputs["loss"], expected, rtol=0, atol=1e-12)
                assert outputs["none"] is None

    assert_same_steps(Mapped, 3)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("in_mapping", [False, True])
def test_a_loss_with_its_count_weighs_by_its_units(in_mapping, settings):
    class Counting(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            kept = x[:, 0] > 0  # more in some parts than in others
            loss = Loss(nn.functional.mse_loss(self(x)[kept], y[kept], reduction="sum"), kept.sum())
            return {"loss": loss} if in_mapping else loss

    assert_same_steps(Counting, 3, max_epochs=3, **settings)


class Logging(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("size", float(len(batch[0])), reduce_fx="sum", on_epoch=True)
        self.log_dict({"low": batch[1].min(), "lower": -batch[1].max()}, reduce_fx="min", on_epoch=True)
        self.log("high", batch[1].max(), reduce_fx="max", on_epoch=True)
        self.log("unweighted", 1.0, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        return {"pred": self(batch[0]), "batch_idx": torch.full((len(batch[0]),), batch_idx)}


def test_what_the_parts_log_is_weighted_by_their_samples():
    (one, on_one), (many, on_many) = (trained(Logging, devices, val_samples=17) for devices in (1, 3))
    torch.testing.assert_close(weights(many), weights(one), rtol=0, atol=1e-12)
    expected, found = on_one.callback_metrics, on_many.callback_metrics
    assert found["size_epoch"] == 41
    for name in ("loss_step", "loss_epoch", "low_epoch", "lower_epoch", "high_epoch", "unweighted_epoch", "val_loss"):
        torch.testing.assert_close(found[name], expected[name])
    [results], [expected_results] = (
        trainer.validate(many, DataLoader(samples(17), 5), verbose=False) for trainer in (on_many, on_one)
    )
    assert results["val_loss"] == pytest.approx(expected_results["val_loss"], rel=0, abs=1e-12)


def test_predictions_are_those_of_one_device_in_the_order_of_the_data():
    module = Logging().double()
    one, many = (trainer_on(n).predict(module, DataLoader(samples(17), 5)) for n in (1, 3))
    assert len(many) == len(one) == 4
    for found, expected in zip(many, one, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def connected(module, devices=2, precision="64-true"):
    """A module that is placed on this number of devices, without a trainer."""
    strategy = DataParallelStrategy()
    strategy.connect(Hardware("cpu", tuple(range(devices))), Precision(precision))
    return strategy.place(module)


def test_the_first_part_updates_the_modules_buffers_and_the_others_none():
    batch = samples(12).tensors
    module, plain = (Net(layer=nn.BatchNorm1d(8)).double() for _ in range(2))
    plain.load_state_dict(module.state_dict())
    connected(module, 3).step_fn("training_step")(batch, 0)
    plain.training_step([rows[:4] for rows in batch], 0)
    assert module.net[1].num_batches_tracked == 1
    for found, expected in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Random(Net):
    """Draws from every generator there is, in forward and (by recomputation) in backward."""

    def __init__(self):
        super().__init__(layer=nn.Dropout(0.5))
        self.drawn = []

    def forward(self, x):
        self.drawn.append((random.random(), torch.rand(1).item()))
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_run_that_draws_random_numbers_can_be_repeated(devices):
    (first, _), (second, _) = (trained(Random, devices) for _ in range(2))
    assert len(set(first.drawn)) == len(first.drawn) > 8
    assert second.drawn == first.drawn
    assert torch.equal(weights(second), weights(first))


def test_gradients_are_added_in_one_order_whatever_ran_before():
    batch = samples(12).tensors

    def gradients(before):
        seed_everything(5)
        module = Net()
        placed = connected(module, 6)
        for size in before:
            placed.step_fn("training_step")([rows[:size] for rows in batch], 0)
        placed.step_fn("training_step")(batch, 0).backward()
        return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    with ThreadPoolExecutor(1) as new:  # as a resumed run begins
        expected = new.submit(gradients, []).result()
    sum([torch.ones((), requires_grad=True)] * 500)  # as one that has come far
    assert torch.equal(gradients([]), expected)
    assert torch.equal(gradients([1, 2, 3, 4, 5, 12, 2]), expected)


class Noting(Net):
    def __init__(self):
        super().__init__()
        self.modes = []

    def predict_step(self, batch, batch_idx):
        y = self.net(batch)
        device = self.device if self._trainer is not None else None
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        self.modes.append((*modes, y.dtype, self.training, torch.get_default_dtype(), device))
        return y


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_every_part_runs_in_the_modes_of_the_whole(precision, context):
    module = Noting().eval()
    placed = connected(module, 3, precision)
    batch = placed.precision.convert_batch(torch.ones(7, 4))
    with context():
        out = placed.step_fn("predict_step")(batch, 0)
        with placed.forward_context:
            module.predict_step(batch, 0)
        assert out.shape == (7, 1)
        assert out.requires_grad == torch.is_grad_enabled()
    assert len(module.modes) == 4
    assert len(set(module.modes)) == 1
    assert torch.get_default_dtype() is torch.float32


def test_mixed_precision_and_loss_scaling_train_on_parts():
    mixed = {"precision": "bf16-mixed", "dtype": torch.float32}
    (one, _), (many, _), (again, _) = (trained(Net, devices, **mixed) for devices in (1, 2, 2))
    torch.testing.assert_close(weights(many), weights(one), rtol=0, atol=2e-2)
    assert torch.equal(weights(many), weights(again))
    _, trainer = trained(Net, 2, num_samples=6, precision="16-mixed", dtype=torch.float32, max_epochs=1)
    assert (trainer.global_step, trainer.counters.skipped_steps) == (1, 0)


def test_an_error_names_the_part_and_leaves_the_module_and_no_thread_behind():
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0)
            if (batch[0] == 5).any():
                raise KeyError("five")
            return super().training_step(batch, batch_idx)

    module, before = Failing(), set(threading.enumerate())
    x = torch.arange(6.0, dtype=torch.float64)[:, None].expand(6, 4)
    with pytest.raises(KeyError, match="five") as caught:
        trainer_on(3).fit(module, DataLoader(TensorDataset(x, x[:, :1]), 6))
    assert caught.value.__notes__ == [
        "training_step failed on slice 3 of 3 of the batch, on cpu.",
        "The batch of micro-batch 0 of epoch 0 is [0] float64[6, 4], [1] float64[6, 1].",
    ]
    assert "log" not in vars(module)
    assert set(threading.enumerate()) <= before


def test_parameters_are_shared_and_what_a_replica_changes_is_lost():
    class Changing(Net):
        count = 0

        def training_step(self, batch, batch_idx):
            self.count += 1
            kinds = Counter(type(parameter) for parameter in self.parameters())
            assert kinds == {nn.Parameter: 4}
            assert [name for name, _ in self.named_parameters()] == names
            return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())

    module = Changing().double()
    names, before = [name for name, _ in module.named_parameters()], list(module.parameters())
    connected(module, 3).step_fn("training_step")(samples(6).tensors, 0).backward()
    assert module.count == 1
    assert all(parameter is old for parameter, old in zip(module.parameters(), before, strict=True))
    reference = Changing().double()
    reference.load_state_dict(module.state_dict())
    reference.training_step(samples(6).tensors, 0).backward()
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-12)


OWN_STATE = {
    "LSTM": lambda: nn.LSTM(8, 8, num_layers=2, batch_first=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("layer", OWN_STATE.values(), ids=OWN_STATE)
def test_layers_with_state_of_their_own_can_be_replicated(layer):
    class Layered(Net):
        def forward(self, x):
            y = self.net[1](self.net[0](x)[:, None])
            return self.net[2](y[0] if isinstance(y, tuple) else y)[:, 0]

    module = Layered(layer=layer()).double()
    whole = module.training_step(samples(7).tensors, 0)
    cut = connected(module, 3).step_fn("training_step")(samples(7).tensors, 0)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_what_cannot_be_cut_over_devices_is_an_error_that_says_so():
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ConfigError, match=r"num_nodes=2; set num_nodes=1.*strategy='ddp'"):
        DataParallelStrategy().validate(Hardware("cpu", (0, 1), num_nodes=2), Precision())
    strategy = DataParallelStrategy()
    strategy.connect(Hardware("cpu", (0, 1)), Precision())
    with pytest.raises(ConfigError, match=r"cannot train Manual on devices=2.*strategy='ddp'"):
        strategy.place(Manual(), is_manual=True)
    compiled = Net()
    compiled.net.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"cannot replicate compiled modules, and Sequential is one.*compile=False"):
        strategy.place(compiled)
    strategy.connect(Hardware("cpu", (0,)), Precision())
    for module in (Manual(), compiled):
        strategy.place(module, is_manual=True)


def test_a_metric_that_replicas_would_lose_cannot_be_logged():
    class Measuring(Net):
        def __init__(self):
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()

        def training_step(self, batch, batch_idx):
            self.log("error", self.error)

    with pytest.raises(ModuleError, match=r"self.log\('error', ...\) got a MeanSquaredError.*log numbers"):
        trained(Measuring, 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("module", [Net, Logging, lambda: Net("adamw", nn.GELU())])
def test_two_gpus_take_the_steps_of_one(module):
    (one, on_one), (many, on_many) = (trained(module, n, accelerator="gpu", val_samples=17) for n in (1, 2))
    torch.testing.assert_close(weights(many), weights(one), rtol=0, atol=1e-12)
    for name, value in on_one.callback_metrics.items():
        torch.testing.assert_close(on_many.callback_metrics[name], value)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_replica_on_a_gpu_knows_its_device():
    class Placing(Net):
        def predict_step(self, batch, batch_idx):
            assert self.device == batch[0].device == self.net[0].weight.device
            return torch.full((len(batch[0]),), float(self.device.index), device=self.device)

    [predictions] = trainer_on(2, accelerator="gpu").predict(Placing(), DataLoader(samples(5), 5))
    assert predictions.tolist() == [0, 0, 0, 1, 1]
