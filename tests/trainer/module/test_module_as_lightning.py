"""What a ported module needs from its base class; the expectations are those of Lightning 2.6.6."""

import io

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, ReduceLROnPlateau, StepLR

from echelon import ConfigError, DataModule, ModuleError, RunError, TrainModule
from echelon.trainer.module.batch_size import size_of, warn_of_unclear_size


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr)


# --- batches ---


def test_the_hooks_of_a_transfer_can_be_extended_by_super():
    class Extending(Regression):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return super().on_before_batch_transfer([*batch, "before"], dataloader_idx)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [*super().transfer_batch_to_device(batch, device, dataloader_idx), device]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*super().on_after_batch_transfer(batch, dataloader_idx), "after"]

    module = Extending()
    quiet(max_steps=1).fit(module, loader(2, 2))
    assert module.seen[0][2:] == ["before", torch.device("cpu"), "after"]


def test_a_batch_has_as_many_samples_as_its_first_tensor():
    module = Regression()
    assert module.batch_size_of({"name": "a", "x": torch.ones(3, 2), "y": torch.ones(4)}) == 3
    assert size_of(["a"]) == size_of(torch.tensor(1.0)) == 1


def test_an_unclear_batch_size_is_named_with_its_entries():
    warn_of_unclear_size({"x": torch.ones(3, 2), "y": [torch.ones(3), torch.tensor(1.0)]})
    with pytest.warns(UserWarning, match=r"batch\['image'\] has 8 entries and batch\['boxes'\]\[1\] 3; 8 is used"):
        warn_of_unclear_size({"image": torch.ones(8, 2), "boxes": [torch.ones(8), torch.ones(3)]})


# --- the trainer, printing, gathering ---


def test_a_trainer_can_be_set_and_reaches_modules_inside():
    outer, trainer = Regression(), quiet()
    outer.inner = Regression()
    outer.trainer = trainer
    assert outer.trainer is outer.inner.trainer is trainer
    outer.trainer = None
    with pytest.raises(RunError, match="is not attached to a `Trainer`"):
        outer.inner.trainer  # noqa: B018


def test_a_module_inside_logs_too():
    class Inner(TrainModule):
        def forward(self, x):
            self.log("inner", 2.0)
            return x

    class Outer(Regression):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch, batch_idx):
            self.inner(batch[0])
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_steps=1)
    trainer.fit(Outer(), loader(2, 2))
    assert trainer.callback_metrics["inner"] == 2.0


def test_print_takes_what_python_takes(capsys):
    file, module = io.StringIO(), Regression()
    module.print("a", 1, sep="-", end="!", file=file)
    assert file.getvalue() == "a-1!"
    module.print("b", 2)
    module.print("c", end="")
    assert capsys.readouterr().out == "b 2\nc"


def test_gathering_on_one_process_adds_no_dimension():
    class Gathering(Regression):
        def on_train_start(self):
            self.gathered = self.all_gather(torch.ones(2, 3)), self.all_gather({"a": 1.0, "b": [torch.tensor(2)]})

    module = Gathering()
    quiet(max_steps=1).fit(module, loader(2, 2))
    tensor, nested = module.gathered
    assert tensor.shape == (2, 3)
    assert nested == {"a": torch.tensor(1.0), "b": [torch.tensor(2)]}


def test_small_things_are_as_there():
    module = Regression()
    assert (module.on_gpu, module.device_mesh, module.CHECKPOINT_HYPER_PARAMS_KEY) == (False, None, "hyper_parameters")
    assert module.freeze() is module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.unfreeze() is module
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("on_class", [False, True])
def test_a_loader_set_to_none_is_switched_off(on_class):
    class Own(Regression):
        def val_dataloader(self):
            return loader(2, 2)

    class Without(Own):
        val_dataloader = None

    module = Without() if on_class else Own()
    module.val_dataloader = None
    quiet(max_steps=1).fit(module, loader(2, 2))
    assert module.validated == []


def test_hyper_parameters_of_module_and_data_must_not_collide():
    class Data(DataModule):
        def __init__(self, width, seed):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(2, 2)

    class Module(Regression):
        def __init__(self, width, seed):
            super().__init__()
            self.save_hyperparameters()

    quiet(max_steps=1).fit(Module(1, seed=3), datamodule=Data(1, seed=3))
    with pytest.raises(ConfigError, match=r"'seed' must be the same in Module and Data, got 3 and 4; rename one"):
        quiet(max_steps=1).fit(Module(1, seed=3), datamodule=Data(1, seed=4))


# --- optimizers ---


def test_self_optimizers_gives_optimizers_that_torch_takes():
    class Scheduling(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self):
            optimizer = self.optimizers()
            assert isinstance(optimizer, torch.optim.Optimizer)
            assert isinstance(optimizer, torch.optim.SGD)
            assert not isinstance(optimizer, torch.optim.Adam)
            self.schedule = StepLR(optimizer, 1, gamma=0.5)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()
            self.schedule.step()

    trainer = quiet(max_steps=3)
    trainer.fit(Scheduling(), loader(8, 2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 / 8
    assert trainer.global_step == 3


def configured(configure):
    class Configured(Regression):
        def configure_optimizers(self):
            return configure(self)

        def validation_step(self, batch, batch_idx):
            self.log("v", 1.0)

    return Configured()


def test_a_monitor_beside_the_scheduler_is_for_a_plateau():
    def plateau(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "v"}

    trainer = quiet(max_epochs=3)
    trainer.fit(configured(plateau), loader(2, 2), loader(2, 2))
    assert trainer.lr_scheduler_configs[0].monitor == "v"
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)

    def steps(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1), "monitor": "v"}

    trainer.fit(configured(steps), loader(2, 2), loader(2, 2))
    assert trainer.lr_scheduler_configs[0].monitor is None


def test_a_scheduler_with_a_monitor_is_not_stepped_with_it_unless_it_is_a_plateau():
    def steps(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "monitor": "never_logged"}}

    trainer = quiet(max_epochs=2)
    trainer.fit(configured(steps), loader(2, 2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_scheduler_of_another_kind_may_be_stepped_with_a_metric():
    metrics = []

    class Own(ConstantLR):
        def step(self, metric=None):
            metrics.append(metric)

    def own(module):
        optimizer = sgd(module)
        config = {"scheduler": Own(optimizer), "monitor": "v", "reduce_on_plateau": True}
        return {"optimizer": optimizer, "lr_scheduler": config}

    quiet(max_epochs=1).fit(configured(own), loader(2, 2), loader(2, 2))
    assert metrics == [None, 1.0]


def test_one_scheduler_needs_no_list():
    def bare(module):
        optimizer = sgd(module)
        return [optimizer], StepLR(optimizer, 1)

    trainer = quiet(max_epochs=1)
    trainer.fit(configured(bare), loader(2, 2))
    assert len(trainer.lr_scheduler_configs) == 1


@pytest.mark.parametrize(
    ("extra", "scheduler_extra", "message"),
    [
        ({"foo": 1}, {}, r"in the optimizer configuration: \{'foo'\}, which are ignored"),
        (
            {},
            {"intervall": "step"},
            r"in the lr scheduler dict: \{'intervall'\}, which are ignored. Did you mean 'interval'\?",
        ),
    ],
)
def test_unknown_keys_are_warned_of(extra, scheduler_extra, message):
    def unknown(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **scheduler_extra}, **extra}

    trainer = quiet(max_epochs=1)
    with pytest.warns(RuntimeWarning, match=message):
        trainer.fit(configured(unknown), loader(2, 2))
    assert len(trainer.lr_scheduler_configs) == 1


def test_a_one_cycle_schedule_by_epoch_is_warned_of():
    def one_cycle(module):
        optimizer = sgd(module)
        return [optimizer], [OneCycleLR(optimizer, 0.1, total_steps=10)]

    with pytest.warns(RuntimeWarning, match=r"OneCycleLR has interval='epoch'.*'step'"):
        quiet(max_epochs=1).fit(configured(one_cycle), loader(2, 2))


def test_a_module_without_an_optimizer_runs_untrained():
    module = configured(lambda module: None)
    before = module.net.weight.clone()
    trainer = quiet(max_epochs=1)
    with pytest.warns(
        UserWarning, match=r"returned None, and this fit will run with no optimizer.*is `return` missing\?"
    ):
        trainer.fit(module, loader(8, 2))
    assert torch.equal(module.net.weight, before)
    assert trainer.global_step == 4


def test_a_form_that_lightning_does_not_know_is_refused():
    with pytest.raises(ModuleError, match=r"configure_optimizers returned int \(3\)"):
        quiet(max_epochs=1).fit(configured(lambda module: 3), loader(2, 2))
