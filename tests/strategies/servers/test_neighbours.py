"""Servers with the trainer's other features: the numbers are those of one process, or an error says what to do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    ActivationCheckpointing,
    BatchSizeFinder,
    Callback,
    ConfigError,
    DDPStrategy,
    EarlyStopping,
    EMAWeightAveraging,
    GoodputMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    ModuleError,
    NaNGuard,
    NonFiniteError,
    ParameterServerStrategy,
    RemoteEmbedding,
    SampleLedger,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Trainer,
    TrainModule,
    seed_everything,
)

SERVED = partial(ParameterServerStrategy, 2)
REMOTE = partial(ParameterServerStrategy, dense="ddp")


class Net(TrainModule):
    """Tied and frozen parameters, a batch norm whose statistics stay, and metrics."""

    def __init__(self, plateau=False):
        super().__init__()
        self.backbone = nn.Linear(4, 6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        self.head[2].weight = self.head[0].weight
        self.head[3].bias.requires_grad_(False)
        self.plateau = plateau

    def forward(self, x):
        return self.head(self.backbone(x).tanh())

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Built(Net):
    """Makes its layers in ``configure_model``."""

    def __init__(self):
        TrainModule.__init__(self)
        self.plateau = False

    def configure_model(self):
        if not hasattr(self, "backbone"):
            Net.__init__(self)


class Clamps(Net):
    """Edits its weights behind autograd's back."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.backbone.weight.data.clamp_(-0.1, 0.1)


class Swaps(Net):
    """Exchanges its weights behind autograd's back, so that their sums stay."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.backbone.weight.data.copy_(self.backbone.weight.data.flip(0))


class Words(TrainModule):
    """A table beside dense layers."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = RemoteEmbedding(40, 4, sparse=sparse), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        ids = (batch[0][:, :2] * 1e4).long().abs() % 40
        return self.head(self.table(ids).mean(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def data():
    x = torch.randn(44, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def fit(strategy, devices, folder, make=Net, callbacks=(), ckpt_path=None, **settings):
    seed_everything(7, verbose=False)
    module = make()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "logger": False,
            "precision": "64-true",
            "max_epochs": 3,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
            **settings,
        },
    )
    validation = DataLoader(data(), 4) if isinstance(module, Net) else None
    size = 8 if "global_batch_size" in settings else 8 // devices
    trainer.fit(module, DataLoader(data(), size, shuffle=True), validation, ckpt_path=ckpt_path)
    return trainer, module


def same(found, expected, within=1e-12):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=within, msg=name)


def everything():
    return [
        LearningRateMonitor(),
        NaNGuard(),
        LossSpikePolicy(warmup=2, threshold=1e3),
        SampleLedger(),
        GoodputMonitor(),
        ThroughputMonitor(),
        EarlyStopping("val", patience=1, min_delta=0.2),
    ]


FEATURES = {
    "exponential average, rates by a metric, clipping by value": {
        "callbacks": lambda: [EMAWeightAveraging(decay=0.7)],
        "make": partial(Net, plateau=True),
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "stochastic average": {"callbacks": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=2)]},
    "clipping by norm, checkpointed activations": {
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "activation_checkpointing": ActivationCheckpointing(modules=nn.Sequential),
    },
    "exchanges by data": {"make": Swaps},
    "all that watches": {"callbacks": everything, "logger": True},
    "edits by data": {"make": Clamps},
    "compiled, accumulation by epoch": {
        "compile": {"backend": "eager"},
        "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
    },
}
MARKS = {"edits by data": pytest.mark.only_in_sweep}  # exchanges are harder to notice


@pytest.mark.parametrize("feature", [pytest.param(name, marks=MARKS.get(name, ())) for name in FEATURES])
def test_a_feature_gives_the_numbers_of_one_process(feature, tmp_path):
    given = dict(FEATURES[feature])
    make_callbacks, is_compiled = given.pop("callbacks", list), given.pop("compile", False)
    (one, alone), (many, served) = (
        fit(strategy, devices, tmp_path / str(devices), callbacks=make_callbacks(), compile=compiled, **given)
        for strategy, devices, compiled in (("single", 1, False), (SERVED(), 2, is_compiled))
    )
    same(served, alone)
    assert many.global_step == one.global_step
    assert many.callback_metrics.keys() == one.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        torch.testing.assert_close(many.callback_metrics[name], value, rtol=1e-6, atol=1e-6, msg=name)


def checkpoints(folder):
    return ModelCheckpoint(folder, monitor="val", save_top_k=2, save_last=True, every_n_epochs=1)


def test_a_run_goes_on_under_other_strategies_and_with_other_numbers_of_servers_and_trainers(tmp_path):
    _, undisturbed = fit("single", 1, tmp_path / "alone", max_epochs=5)
    layouts = [(SERVED(), 2), (ParameterServerStrategy(3), 3), (DDPStrategy(), 2), (ParameterServerStrategy(), 1)]
    for epochs, (strategy, devices) in enumerate([*layouts, (SERVED(), 2)], start=1):
        last = {"ckpt_path": "last" if epochs > 1 else None, "max_epochs": epochs, "global_batch_size": 8}
        trainer, module = fit(strategy, devices, tmp_path, callbacks=[checkpoints(tmp_path)], **last)
        assert trainer.current_epoch == epochs
    same(module, undisturbed)
    assert len(list(tmp_path.glob("epoch*"))) == 2


def test_a_trainer_evaluates_saves_and_fits_again_after_a_fit_with_servers(tmp_path):
    trainer, module = fit(SERVED(), 2, tmp_path, callbacks=[ModelCheckpoint(tmp_path)])
    loader = DataLoader(data(), 4)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    [after] = trainer.validate(module, loader, verbose=False)
    alone = Trainer(accelerator="cpu", devices=1, precision="64-true", logger=False, enable_progress_bar=False)
    assert after["val"] == pytest.approx(alone.validate(module, loader, verbose=False)[0]["val"], rel=1e-9)
    more, continued = fit("single", 1, tmp_path, ckpt_path=tmp_path / "after.ckpt", max_epochs=4, global_batch_size=8)
    _, undisturbed = fit("single", 1, tmp_path, max_epochs=4)
    same(continued, undisturbed)
    assert more.global_step == 4 * 6
    trainer.fit(Net(), loader, loader)
    assert trainer.global_step == 3 * 6


class Watches(Callback):
    """Goes back at a step, loads weights, or notes the weights of a validation."""

    def __init__(self, does):
        self.does, self.seen = does, {}

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state_dict):
        self.seen = dict(state_dict)

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 9 and self.does == "go back" and "path" not in self.seen:
            self.seen["path"] = str(trainer.roll_back())
            self.seen["weight"] = module.backbone.weight.detach().clone()
        if trainer.global_step == 9 and self.does == "load":
            state = {name: torch.full_like(value, 0.25) for name, value in module.state_dict().items()}
            trainer.strategy.load_model_state(state)

    def on_validation_end(self, trainer, module):
        self.seen["validated"] = module.backbone.weight.detach().clone()


class Rated(Net):
    """Has momentum and a rate."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class Slow(Net):
    """Its steps leave the weights about as they are."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


@pytest.mark.parametrize("is_async", [False, True])
def test_weights_that_are_loaded_between_two_steps_reach_the_servers(is_async, tmp_path):
    strategy = ParameterServerStrategy(mode="async", max_staleness=2) if is_async else SERVED()
    _, module = fit(strategy, 2, tmp_path, make=Slow, callbacks=[Watches("load")])
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, torch.full_like(value, 0.25), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_goes_back_has_the_weights_of_the_checkpoint(is_async, tmp_path):
    strategies = (ParameterServerStrategy(mode="async", max_staleness=2), "ddp") if is_async else (SERVED(), "ddp")
    ended = []
    for index, strategy in enumerate(strategies):
        folder = tmp_path / str(index)
        watches = Watches("go back")
        callbacks = [watches, ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1)]
        trainer, module = fit(
            strategy, 2, folder, make=partial(Rated, lr=0.0 if is_async else 0.02), callbacks=callbacks
        )
        assert "step=6" in watches.seen["path"] and trainer.global_step < 18
        ended.append(module)
    same(*ended)


def test_an_average_of_async_mode_is_what_is_validated_saved_and_left(tmp_path):
    strategy = ParameterServerStrategy(mode="async", max_staleness=2)
    watches, average = Watches("nothing"), EMAWeightAveraging(decay=1.0)  # stays what it was after the first step
    saved = ModelCheckpoint(tmp_path, save_last=True)
    _, module = fit(strategy, 2, tmp_path, callbacks=[watches, average, saved])
    weights = Net.load_from_checkpoint(tmp_path / "last.ckpt").state_dict()
    torch.testing.assert_close(module.backbone.weight, watches.seen["validated"], rtol=0, atol=0)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(weights[name].double(), value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.only_in_sweep), True])
def test_what_watches_gradients_and_memory_sees_those_of_tables(sparse, tmp_path):
    report = MemoryReport()
    watching = [report, NaNGuard(), LossSpikePolicy(warmup=2, threshold=100.0)]
    make = partial(Words, sparse=sparse)
    _, alone = fit("single", 1, tmp_path, make=make)
    _, served = fit(REMOTE(), 2, tmp_path, make=make, callbacks=watching)
    same(served, alone)
    dense = 5 * 8
    assert report.expected["parameters"] == dense
    assert dense <= report.measured["parameters"] <= dense + 8  # the place of the table takes one number
    assert dense < report.measured["gradients"] < served.table.weight.nbytes


def test_what_cannot_be_with_servers_says_so(tmp_path):
    for finder in (LearningRateFinder(), BatchSizeFinder()):
        with pytest.raises(ConfigError, match="steps that can be undone, got strategy='ps'"):
            fit(SERVED(), 1, tmp_path, callbacks=[finder])
    with pytest.raises(ConfigError, match="RemoteEmbedding 'table'.*leave out dense='ddp'"):
        fit(REMOTE(), 1, tmp_path, make=Words, callbacks=[EMAWeightAveraging()])


def test_sparse_gradients_of_what_is_pushed_whole_are_refused(tmp_path):
    with pytest.raises(ModuleError, match=r"got a sparse one for table.weight; give its layer sparse=False"):
        fit(ParameterServerStrategy(), 2, tmp_path, make=partial(Words, sparse=True))


class NaNs(Net):
    """Has no finite loss for one sample, which one trainer gets."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_step == 2 and self.global_rank == 1 else loss


def test_a_loss_that_is_not_finite_on_one_trainer_is_named(tmp_path):
    with pytest.raises(NonFiniteError, match="Rank 1: The loss is nan at global_step 2"):
        fit(SERVED(), 2, tmp_path, make=NaNs, callbacks=[NaNGuard()])


def test_what_is_built_late_is_what_ddp_trains(tmp_path):
    _, reduced = fit("ddp", 2, tmp_path, make=Built)
    _, served = fit(SERVED(), 2, tmp_path, make=Built)
    same(served, reduced)


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("32-true", marks=pytest.mark.only_in_sweep), "16-mixed"]
)
def test_other_precisions_take_the_steps_of_ddp(precision, tmp_path):
    class Single(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step([part.float() for part in batch], batch_idx)

        def validation_step(self, batch, batch_idx):
            return super().validation_step([part.float() for part in batch], batch_idx)

    settings = {"make": Single, "precision": precision, "gradient_clip_val": 0.1}
    _, reduced = fit("ddp", 2, tmp_path, **settings)
    _, served = fit(SERVED(), 2, tmp_path, **settings)
    same(served, reduced, within=1e-5)
