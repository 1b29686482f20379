"""Whatever configure_optimizers returns is stepped when it should be, and only then."""

import functools

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon import Callback, ConfigError, ModelCheckpoint, ModuleError


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def fitted(kind, epochs=1):
    """A module of this class, trained from the same weights in every call."""
    torch.manual_seed(0)
    module = kind()
    quiet(max_epochs=epochs).fit(module, loader())
    return module


def configured(configure, base=Regression):
    """A module that returns this."""

    class Configured(base):
        def configure_optimizers(self):
            return configure(self)

    return Configured()


def sgd(module, lr=0.1):
    return SGD(module.parameters(), lr=lr)


def rate(trainer, index=0):
    return trainer.optimizers[index].param_groups[0]["lr"]


class Rates(Callback):
    """The learning rate of each step."""

    def __init__(self):
        self.rates = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(round(optimizer.param_groups[0]["lr"], 6))


# --- shapes ---


def with_dict(module, **scheduler):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **scheduler}}


def two_lists(module):
    first, second = sgd(module), sgd(module)
    return [first, second], [StepLR(first, 1), {"scheduler": StepLR(second, 1), "interval": "step"}]


@pytest.mark.parametrize(
    ("configure", "num_optimizers", "intervals"),
    [
        (sgd, 1, []),
        (lambda m: [sgd(m)], 1, []),
        (lambda m: [sgd(m), Adam(m.parameters())], 2, []),
        (lambda m: (sgd(m), sgd(m)), 2, []),
        (lambda m: {"optimizer": sgd(m)}, 1, []),
        (lambda m: {"optimizer": sgd(m), "lr_scheduler": None}, 1, []),
        (with_dict, 1, ["epoch"]),
        (lambda m: with_dict(m, interval="step", frequency=2, name="mine"), 1, ["step"]),
        (lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": StepLR(o, 1)}, 1, ["epoch"]),
        (lambda m: [with_dict(m), with_dict(m, interval="step")], 2, ["epoch", "step"]),
        (two_lists, 2, ["epoch", "step"]),
        (lambda m: ([sgd(m)], []), 1, []),
        (lambda m: [], 0, []),
    ],
)
@pytest.mark.filterwarnings("ignore:net.weight is in 2 optimizers")
def test_every_shape_that_lightning_accepts_is_accepted(configure, num_optimizers, intervals):
    module, trainer = configured(configure), quiet(max_epochs=1)
    before = weights(module)
    trainer.fit(module, loader())
    assert len(trainer.optimizers) == num_optimizers
    assert [config.interval for config in trainer.lr_scheduler_configs] == intervals
    assert trainer.counters.optimizer_steps == [4] * num_optimizers
    assert torch.equal(weights(module), before) == (num_optimizers == 0)


def test_a_module_without_parameters_to_train_needs_no_optimizer():
    class Frozen(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.seen.append(batch)

        def configure_optimizers(self):
            return None

    module, trainer = Frozen(), quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert trainer.global_step == len(module.seen) == 4


def test_several_optimizers_step_with_the_gradients_of_one_backward():
    class Both(Regression):
        def configure_optimizers(self):
            return [SGD([self.net.weight], lr=0.1), SGD([self.net.bias], lr=0.1)]

    assert torch.equal(weights(fitted(Both, 2)), weights(fitted(Regression, 2)))


def test_several_optimizers_in_automatic_mode_are_told_once_in_the_log(caplog):
    class Both(Regression):
        def configure_optimizers(self):
            return [SGD([self.net.weight], lr=0.1), Adam([self.net.bias], lr=0.1)]

    with caplog.at_level("INFO", "echelon"):
        quiet(max_epochs=2).fit(Both(), loader())
    [said] = [record.getMessage() for record in caplog.records if "automatic_optimization" in record.getMessage()]
    assert said.startswith(
        "SGD and Adam of Both step together, with every loss; set self.automatic_optimization = False"
    )


# --- when schedulers are stepped ---


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        ({}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ({"frequency": 2}, [1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5]),
        ({"interval": "step"}, [0.5**step for step in range(9)]),
        ({"interval": "step", "frequency": 4}, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]),
    ],
)
def test_a_scheduler_is_stepped_every_so_many_epochs_or_steps(config, rates):
    def configure(module):
        optimizer = sgd(module, lr=1.0)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), **config}]

    seen = Rates()
    quiet(max_epochs=3, callbacks=seen).fit(configured(configure), loader(6, 2))
    assert seen.rates == [round(value, 6) for value in rates]


def test_a_scheduler_by_step_counts_optimizer_steps_and_not_micro_batches():
    def configure(module):
        optimizer = sgd(module, lr=1.0)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]

    seen = Rates()
    quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=seen).fit(configured(configure), loader(12, 2))
    assert seen.rates == [1.0, 0.5, 0.25]


def test_a_one_cycle_schedule_ends_where_the_run_ends():
    def configure(module):
        optimizer = sgd(module)
        steps = module.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 1.0, total_steps=steps), "interval": "step"}]

    trainer = quiet(max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(configured(configure), loader(10, 2))
    assert trainer.global_step == trainer.estimated_stepping_batches == 9
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 9


class Plateau(Regression):
    """Its validation loss never improves."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


def plateau(**config):
    def configure(module):
        optimizer = sgd(module, lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0), **config},
        }

    return configure


def test_a_plateau_scheduler_is_stepped_with_its_metric():
    seen = Rates()
    module = configured(plateau(monitor="val_loss"), Plateau)
    quiet(max_epochs=3, callbacks=seen).fit(module, loader(4, 2), loader(2, 2))
    assert seen.rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_plateau_scheduler_may_be_stepped_with_a_metric_of_each_step():
    class Logging(Regression):
        def training_step(self, batch, batch_idx):
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

    seen = Rates()
    module = configured(plateau(monitor="flat", interval="step", frequency=2), Logging)
    quiet(max_epochs=1, callbacks=seen).fit(module, loader(12, 2))
    assert seen.rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_plateau_scheduler_that_is_not_strict_waits_for_its_metric():
    seen = Rates()
    module = configured(plateau(monitor="val_loss", strict=False), Plateau)
    quiet(max_epochs=4, check_val_every_n_epoch=2, callbacks=seen).fit(module, loader(2, 2), loader(2, 2))
    assert seen.rates[0] == seen.rates[1] == 1.0


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        # validations after epochs 1 and 3; the value of the first is the best, and counts again in epoch 2
        ({}, {"check_val_every_n_epoch": 2}, [1.0, 1.0, 1.0, 0.5, 0.25]),
        ({"frequency": 2}, {"check_val_every_n_epoch": 2}, [1.0, 1.0, 1.0, 1.0, 0.5]),
        ({"interval": "step", "frequency": 4}, {"val_check_interval": 6, "check_val_every_n_epoch": None}, None),
    ],
    ids=["epochs", "frequency", "steps"],
)
def test_a_plateau_scheduler_waits_for_the_first_validation(config, settings, expected):
    seen = Rates()
    module = configured(plateau(monitor="val_loss", **config), Plateau)
    quiet(max_epochs=5, callbacks=seen, **settings).fit(module, loader(4, 2), loader(2, 2))
    assert seen.rates[::2] == (expected or [1.0, 1.0, 1.0, 1.0, 1.0])


def test_a_plateau_scheduler_goes_on_after_a_resume_before_the_first_validation(tmp_path):
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2)
    settings = {"check_val_every_n_epoch": 2, "enable_checkpointing": True}
    whole = configured(plateau(monitor="val_loss"), Plateau)
    trainer = quiet(max_epochs=4, callbacks=saving, **settings)
    trainer.fit(whole, loader(4, 2), loader(2, 2))
    for path in (tmp_path / "epoch=0-step=2.ckpt", tmp_path / "epoch=2-step=6.ckpt"):
        resumed = quiet(max_epochs=4, check_val_every_n_epoch=2)
        module = configured(plateau(monitor="val_loss"), Plateau)
        resumed.fit(module, loader(4, 2), loader(2, 2), ckpt_path=path)
        assert rate(resumed) == rate(trainer)
        torch.testing.assert_close(weights(module), weights(whole), rtol=0, atol=0)


def test_a_metric_that_no_validation_logs_is_an_error_after_the_first():
    module = configured(plateau(monitor="val_los"), Plateau)
    trainer = quiet(max_epochs=5, check_val_every_n_epoch=2)
    with pytest.raises(ConfigError, match=r"val_los, which is not available. Available metrics are: \['val_loss'\]"):
        trainer.fit(module, loader(4, 2), loader(2, 2))
    assert trainer.counters.epoch == 1


def test_a_scheduler_of_the_users_own_needs_only_a_step():
    class Mine:
        def __init__(self):
            self.num_steps = 0

        def step(self):
            self.num_steps += 1

        def state_dict(self):
            return {}

    mine = Mine()
    quiet(max_epochs=3).fit(configured(lambda m: ([sgd(m)], [mine])), loader())
    assert mine.num_steps == 3


def test_manual_optimization_steps_its_schedulers_itself():
    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if batch_idx == 0:
                self.lr_schedulers()[0].step()

    def configure(module):
        optimizer = sgd(module, 1.0)
        return [optimizer], [ExponentialLR(optimizer, 0.5), ReduceLROnPlateau(optimizer)]

    module, seen = configured(configure, Manual), Rates()
    quiet(max_epochs=2, callbacks=seen).fit(module, loader(6, 2))
    assert seen.rates == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


# --- hooks of the optimizer step ---


def test_optimizer_step_may_warm_up_the_rate():
    class WarmUp(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.global_step + 1)

    seen = Rates()
    quiet(max_epochs=1, callbacks=seen).fit(WarmUp(), loader())
    assert seen.rates == [0.1, 0.01, 0.02, 0.03]


def test_optimizer_step_may_leave_an_update_out():
    class EverySecond(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()  # the loss and the gradients alone

    trainer = quiet(max_epochs=1)
    trainer.fit(EverySecond(), loader())
    assert (trainer.global_step, trainer.counters.optimizer_steps) == (4, [2])


def test_the_closure_returns_the_loss_without_computing_it_twice():
    class Closing(Regression):
        def __init__(self):
            super().__init__()
            self.losses = []

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.losses.append(optimizer_closure().item())
            optimizer.step()

    module, plain = fitted(Closing), fitted(Regression)
    assert len(module.seen) == len(module.losses) == 4
    assert torch.equal(weights(module), weights(plain))


def test_gradients_may_be_clipped_in_another_way():
    class Own(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            assert (gradient_clip_val, gradient_clip_algorithm) == (0.5, "norm")
            self.clip_gradients(optimizer, 1e-6, "value")

    module = Own()
    before = weights(module)
    quiet(max_epochs=1, gradient_clip_val=0.5).fit(module, loader())
    assert 0 < (weights(module) - before).abs().max() < 1e-5


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_limit_of_0_clips_nothing_and_one_below_is_refused(algorithm):
    class Own(Regression):
        limit = 0

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, self.limit, algorithm)

    module, plain = fitted(Own), fitted(Regression)
    assert torch.equal(weights(module), weights(plain))
    module.limit = -1.0
    with pytest.raises(ModuleError, match=r"gradient_clip_val must be above 0, got -1.0"):
        quiet(max_epochs=1).fit(module, loader())


def test_backward_zero_grad_and_scheduler_steps_may_be_overridden():
    class Own(Regression):
        def __init__(self):
            super().__init__()
            self.calls = []

        def backward(self, loss):
            self.calls.append("backward")
            super().backward(loss)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.calls.append("zero")
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def lr_scheduler_step(self, scheduler, metric):
            self.calls.append("schedule")
            super().lr_scheduler_step(scheduler, metric)

    module = configured(lambda m: ([o := sgd(m)], [LambdaLR(o, lambda epoch: 1.0)]), Own)
    quiet(max_epochs=1).fit(module, loader(4, 2))
    assert module.calls == ["zero", "backward", "zero", "backward", "schedule"]


def test_a_scheduler_may_be_made_and_stepped_by_a_callback():
    class Schedules(Callback):
        def on_train_start(self, trainer, module):
            self.scheduler = StepLR(trainer.optimizers[0], 1)  # replaces the optimizer's step, to count its calls

        def on_train_epoch_end(self, trainer, module):
            self.scheduler.step()  # a warning, if it had not seen any

    trainer = quiet(max_epochs=2, callbacks=Schedules())
    trainer.fit(configured(sgd), loader())
    assert rate(trainer) == pytest.approx(0.1 * 0.1**2)


ANY_STEP = {"any pre": register_optimizer_step_pre_hook, "any post": register_optimizer_step_post_hook}


class StepsWatched(Callback):
    """Watches the optimizer's steps in one way, from the second on."""

    def __init__(self, way):
        self.way, self.seen = way, []

    def note(self, *_):
        self.seen.append(self.global_step())

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx != 1:
            return
        optimizer, self.global_step = trainer.optimizers[0], lambda: trainer.global_step
        if self.way == "profiler":
            self.profile = torch.autograd.profiler.profile()
            self.profile.__enter__()
        elif self.way == "replaced":
            method = optimizer.step
            optimizer.step = functools.wraps(method)(lambda *args: (self.note(), method(*args)))
        elif self.way.startswith("any "):
            self.handle = ANY_STEP[self.way](self.note)
        else:
            getattr(optimizer, f"register_step_{self.way}_hook")(self.note)

    def on_train_end(self, trainer, module):
        if self.way == "profiler":
            self.profile.__exit__(None, None, None)
            steps = [event for event in self.profile.function_events if event.name.startswith("Optimizer.step#SGD")]
            self.seen = list(range(1, 1 + len(steps)))
        elif self.way.startswith("any "):
            self.handle.remove()


@pytest.mark.parametrize("has_scheduler", [False, True])
@pytest.mark.parametrize("way", ["pre", "post", "any pre", "any post", "replaced", "profiler"])
def test_who_watches_an_optimizer_sees_each_of_its_steps(way, has_scheduler):
    def both(module):
        return [optimizer := sgd(module)], [StepLR(optimizer, 1)] if has_scheduler else []

    def trained(*callbacks):
        torch.manual_seed(0)
        module = configured(both)
        quiet(max_epochs=1, callbacks=list(callbacks)).fit(module, loader(8, 2))
        return weights(module)

    watch = StepsWatched(way)
    assert torch.equal(trained(watch), trained())
    assert watch.seen == [1, 2, 3]


class CountsZeroGrad(SGD):
    num_zeroed = 0

    def zero_grad(self, set_to_none=True):
        self.num_zeroed += 1
        super().zero_grad(set_to_none)


def test_an_optimizer_with_a_zero_grad_of_its_own_is_asked():
    trainer = quiet(max_epochs=1)
    trainer.fit(configured(lambda m: CountsZeroGrad(m.parameters(), lr=0.1)), loader(4, 2))
    assert trainer.optimizers[0].num_zeroed == 2


def test_gradients_of_parameters_that_an_optimizer_got_later_are_dropped_too():
    class Thaws(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 1:
                trainer.optimizers[0].add_param_group({"params": [module.net.bias]})

        def on_after_backward(self, trainer, module):
            module.gradients.append(module.net.bias.grad.clone())

    def bias_gradients(*callbacks):
        torch.manual_seed(0)
        module = configured(lambda m: SGD([m.net.weight], lr=0.0))
        module.gradients = []
        quiet(max_epochs=1, callbacks=[Thaws(), *callbacks]).fit(module, loader(6, 2))
        return module.gradients

    class AsTheOptimizerDoes(Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            """Nothing: where someone listens, `zero_grad` itself is called."""

    assert len(bias_gradients()) == 3
    assert torch.equal(torch.stack(bias_gradients()), torch.stack(bias_gradients(AsTheOptimizerDoes())))


# --- optimizers that evaluate the loss themselves ---


class Second(Regression):
    def configure_optimizers(self):
        return LBFGS(self.parameters(), lr=1.0, max_iter=10, line_search_fn="strong_wolfe")


def test_lbfgs_converges():
    torch.manual_seed(0)
    module = Second()
    trainer = quiet(max_epochs=5)
    trainer.fit(module, loader(8, 8))
    x, y = module.seen[-1]
    assert nn.functional.mse_loss(module(x), y) < 1e-9
    assert trainer.global_step == 5
    assert len(module.seen) > 5


def test_lbfgs_sees_the_whole_accumulated_batch():
    def run(batch_size, **settings):
        torch.manual_seed(0)
        module = Second()
        quiet(max_epochs=2, precision="64-true", **settings).fit(module, loader(8, batch_size))
        return weights(module)

    torch.testing.assert_close(run(4, accumulate_grad_batches=2), run(8), rtol=0, atol=1e-9)


# --- toggling ---


def test_toggling_an_optimizer_freezes_the_parameters_of_the_others():
    class Toggling(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.states = []

        def note(self):
            self.states.append((self.net.weight.requires_grad, self.net.bias.requires_grad))

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in (first, second):
                with self.toggled_optimizer(optimizer):
                    self.note()
            self.note()

        def configure_optimizers(self):
            return [SGD([self.net.weight], lr=0.1), SGD([self.net.bias], lr=0.1)]

    module = Toggling()
    quiet(max_steps=1).fit(module, loader())
    assert module.states == [(True, False), (False, True), (True, True)]
