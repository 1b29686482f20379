"""Programs drawn at random: what a module, data, callbacks and a trainer may be together, and how a run ends."""

import os
import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torchmetrics
from as_rank import attempt
from matrix import whole_state
from recording_logger import RecordingLogger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from unusual_modules import LAYOUTS as UNUSUAL_LAYOUTS
from unusual_modules import Layout, Plain

from echelon import (
    Callback,
    DataModule,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    Loss,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Trainer,
    seed_everything,
)

_OWN = [
    Layout("single", 1, lambda: "single", devices=1),
    Layout("ddp x 2", 2, lambda: "ddp"),
    Layout("ddp x 3", 3, lambda: "ddp"),
    Layout("zero x 2", 2, lambda: "zero"),
    Layout("fsdp x 3", 3, lambda: "fsdp"),
]
LAYOUTS = {one.title: one for one in [*UNUSUAL_LAYOUTS, *_OWN] if one.title != "cp x 2"}
"""The layouts by their titles; parts of sequences have other extreme values than whole ones, which cp refuses."""

ACCELERATOR = os.environ.get("ECHELON_TEST_DEVICE", "cpu")
"""That of every layout but `single`, with which they are compared."""

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}
SCHEDULES = {
    "none": None,
    "by step": (partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), {"interval": "step"}),
    "by epoch": (partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), {}),
    "by two steps": (partial(lr_scheduler.ExponentialLR, gamma=0.7), {"interval": "step", "frequency": 2}),
    "one cycle": (
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=200, cycle_momentum=False),
        {"interval": "step"},
    ),
    "restarts": (partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2), {}),
    "plateau": (
        partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5),
        {"monitor": "reduced"},
    ),
}
ORDERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "a sampler": {"sampler": RandomSampler},
    "with replacement": {"sampler": partial(RandomSampler, replacement=True)},
    "a part": {"sampler": lambda data, generator: SubsetRandomSampler(range(0, len(data), 2), generator)},
    "weighted": {
        "sampler": lambda data, generator: WeightedRandomSampler(
            [1 + index % 3 for index in range(len(data))], len(data), generator=generator
        )
    },
}
SOURCES = ("loader", "data module")
METRICS = {
    "none": None,
    "mean": torchmetrics.MeanMetric,
    "largest": torchmetrics.MaxMetric,
    "all values": torchmetrics.CatMetric,
    "squared error": torchmetrics.MeanSquaredError,
    "rank correlation": torchmetrics.SpearmanCorrCoef,
}
OVERRIDES = ("optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad", "lr_scheduler_step")
CALLBACKS = ("average of steps", "average of epochs", "checkpoints", "stopping", "rates", "freezing")


@dataclass(frozen=True)
class Program:
    """A program as a function of its seed."""

    seed: int
    batch: int
    global_batch: int
    samples: int
    order: str
    drop_last: bool
    optimizer: str
    schedule: str
    clip: dict
    units: bool
    epochs: int
    max_steps: int
    validation: dict | None
    val_samples: int
    val_loaders: int
    sanity: int
    log_every: int
    log_how: dict
    reduce_fx: str
    callbacks: tuple[str, ...]
    every: dict
    top_k: int
    is_tied: bool
    stop: int
    """The step after which a checkpoint is saved, from which another run goes on."""
    source: str
    num_workers: int
    metric: str
    num_groups: int
    has_two_schedules: bool
    overrides: tuple[str, ...]
    last_epoch: int | None
    """The epoch after which a hook ends the run."""

    @classmethod
    def drawn(cls, seed):
        """Return the program of a seed."""
        draw = random.Random(seed)
        batch = draw.choice((1, 2, 3))
        global_batch = batch * draw.choice((2, 4, 8)) + draw.choice((0, 0, 0, 1))
        return cls(
            seed=seed,
            batch=batch,
            global_batch=global_batch,
            samples=draw.randint(global_batch, 5 * global_batch),
            order=draw.choice(list(ORDERS)),
            drop_last=draw.random() < 0.2,
            optimizer=draw.choice(list(OPTIMIZERS)),
            schedule=draw.choice(list(SCHEDULES)),
            clip=draw.choice(
                ({}, {}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
            ),
            units=draw.random() < 0.25,
            epochs=draw.randint(1, 3),
            max_steps=draw.choice((-1, -1, draw.randint(2, 9))),
            validation=draw.choice(
                (None, {}, {"check_val_every_n_epoch": 2}, {"val_check_interval": f"{2 * global_batch} samples"})
            ),
            val_samples=draw.randint(1, 9),
            val_loaders=draw.choice((1, 1, 2)),
            sanity=draw.choice((0, 0, 2)),
            log_every=draw.choice((1, 1, 2, 3)),
            log_how=draw.choice(
                ({"on_step": True}, {"on_step": False, "on_epoch": True}, {"on_step": True, "on_epoch": True})
            ),
            reduce_fx=draw.choice(("mean", "mean", "sum", "max", "min")),
            callbacks=tuple(name for name in CALLBACKS if draw.random() < 0.25),
            every=draw.choice(({"every_n_train_steps": draw.randint(1, 3)}, {"every_n_epochs": 1}, {})),
            top_k=draw.choice((-1, 1, 2)),
            is_tied=draw.random() < 0.15,
            stop=draw.randint(1, 6),
            source=draw.choice(SOURCES),
            num_workers=int(draw.random() < 0.1),
            metric=draw.choice([*METRICS, "none", "none"]),
            num_groups=draw.choice((1, 1, 2)),
            has_two_schedules=draw.random() < 0.15,
            overrides=tuple(name for name in OVERRIDES if draw.random() < 0.15),
            last_epoch=draw.choice((None, None, None, draw.randint(0, 1))),
        )


class Net(Plain):
    """A small network that logs what a program says."""

    def __init__(self, program):
        super().__init__()
        self.program, self.rates = program, []
        make_metric = METRICS[program.metric]
        self.metrics = nn.ModuleDict(
            {} if make_metric is None else {task: make_metric() for task in ("fit", "validate")}
        )
        if program.is_tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def errors(self, batch):
        return (self.head(self.hidden(batch[0], 0)) - batch[1]).square().mean((1, 2))

    def observe(self, name, errors, batch, dataloader_idx=0):
        """Log a metric object of a batch of the first loader."""
        if self.program.metric == "none" or dataloader_idx:
            return
        metric = self.metrics[name]
        has_two = self.program.metric in ("squared error", "rank correlation")
        metric(*(errors.detach(), batch[1].mean((1, 2))) if has_two else (errors.detach(),))
        if self.program.metric != "all values":
            self.log(f"{name} metric", metric, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def log_all_values(self, name):
        """Log what a metric has kept of an epoch, and let it begin anew."""
        if self.program.metric == "all values":
            self.log(f"{name} metric", self.metrics[name].compute().square().sum())
            self.metrics[name].reset()

    def training_step(self, batch, batch_idx):
        errors, units = self.errors(batch), batch[2]
        self.observe("fit", errors, batch)
        self.log("loss", errors.mean(), **self.program.log_how)
        reduced = getattr(errors.detach(), self.program.reduce_fx)()
        self.log("reduced", reduced, on_step=False, on_epoch=True, reduce_fx=self.program.reduce_fx)
        return Loss((errors * units).sum(), units.sum()) if self.program.units else errors.mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        errors = self.errors(batch)
        self.observe("validate", errors, batch, dataloader_idx)
        self.log("val", errors.mean())
        self.log("val_max", errors.max(), reduce_fx="max")

    def test_step(self, batch, batch_idx):
        self.log("test", self.errors(batch).sum(), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.errors(batch)

    def on_train_epoch_end(self):
        self.log("number", float(self.current_epoch))
        self.log_all_values("fit")
        if self.current_epoch == self.program.last_epoch:
            self.trainer.should_stop = True

    def on_validation_epoch_end(self):
        self.log_all_values("validate")

    def on_train_step_end(self):
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        step = self.trainer.global_step
        self.rates.extend(((step, f"lr {number}"), group["lr"]) for number, group in enumerate(groups))

    def configure_optimizers(self):
        head = {id(parameter) for parameter in self.head.parameters()}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in head]
        groups = [{"params": [*self.head.parameters()], "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]
        optimizer = OPTIMIZERS[self.program.optimizer](groups if self.program.num_groups == 2 else self.parameters())
        if self.program.schedule == "none":
            return optimizer
        make, settings = SCHEDULES[self.program.schedule]
        second = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [{"scheduler": make(optimizer), **settings}, *[second] * self.program.has_two_schedules]


class OwnStep:
    """Steps with the closure itself."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class OwnClipping:
    """Clips whatever the trainer is told."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


class OwnZeroing:
    """Keeps gradients of zero."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class OwnScheduling:
    """Steps each schedule twice."""

    def lr_scheduler_step(self, scheduler, metric):
        super().lr_scheduler_step(scheduler, metric)
        super().lr_scheduler_step(scheduler, metric)


OWN = {
    "optimizer_step": OwnStep,
    "configure_gradient_clipping": OwnClipping,
    "optimizer_zero_grad": OwnZeroing,
    "lr_scheduler_step": OwnScheduling,
}


def module_of(program):
    """Return the module of a program, with the methods that it overrides."""
    return type("Drawn", (*(OWN[name] for name in program.overrides), Net), {})(program)


class Data(DataModule):
    """The data of a program; what it trains on differs from epoch to epoch."""

    def __init__(self, program):
        super().__init__()
        self.program = program

    def train_dataloader(self):
        return train_loader(self.program, self.trainer.current_epoch)

    def val_dataloader(self):
        return val_loaders(self.program)


def data(number, seed):
    """Return sequences of 4, their targets, and how much each counts."""
    x = torch.randn(number, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(2, keepdim=True)), torch.arange(number) % 3)


def train_loader(program, seed=0):
    """Return the training data of a program, in its order."""
    samples, order = data(program.samples, 1 + 100 * seed), dict(ORDERS[program.order])
    if "sampler" in order:
        order["sampler"] = order["sampler"](samples, generator=torch.Generator().manual_seed(3 + seed))
    workers = {"num_workers": program.num_workers}
    return DataLoader(samples, program.batch, drop_last=program.drop_last, **workers, **order)


def val_loaders(program):
    """Return the validation data of a program, if it validates."""
    if program.validation is None:
        return None
    loaders = [DataLoader(data(program.val_samples + number, 2 + number), 2) for number in range(program.val_loaders)]
    return loaders if len(loaders) > 1 else loaders[0]


class SaveAfter(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            self.step = None
            trainer.save_checkpoint(self.path)


def callbacks_of(program, folder):
    """Return the callbacks of a program by their names."""
    makers = {
        "average of steps": partial(EMAWeightAveraging, decay=0.7),
        "average of epochs": partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1),
        "checkpoints": partial(
            ModelCheckpoint,
            folder / "checkpoints",
            "{epoch}-{step}",
            monitor="reduced",
            save_last=True,
            save_top_k=program.top_k,
            **program.every,
        ),
        "stopping": partial(EarlyStopping, "reduced", patience=1, mode="max"),
        "rates": LearningRateMonitor,
        "freezing": partial(
            LambdaCallback,
            on_train_epoch_start=lambda trainer, module: module.embed.requires_grad_(trainer.current_epoch != 1),
        ),
    }
    has_two = {"average of steps", "average of epochs"} <= set(program.callbacks)
    return {name: makers[name]() for name in program.callbacks if not (has_two and name == "average of epochs")}


@dataclass
class End:
    """How a run ends; each part is compared with that of one process."""

    weights: dict = field(default_factory=dict)
    rows: list = field(default_factory=list)
    """The step and name of each value that loggers got, and the value."""
    rates: list = field(default_factory=list)
    """Likewise, the rates after each step."""
    counters: tuple = ()
    metrics: dict = field(default_factory=dict)
    """Those of training and validation, a test after the fit, and the predictions."""
    saved: tuple = ()
    """The names of the checkpoints that are left, and of the best."""
    error: str | None = None

    def after(self, step):
        """Return what a run that was resumed after a step has of it."""
        rows, rates = ([row for row in part if row[0][0] > step] for part in (self.rows, self.rates))
        return End(self.weights, rows, rates, self.counters, self.metrics, error=self.error)


def run(seed, layout, folder, checkpoint=None):
    """Return how a program ends in a layout; one that goes on from a checkpoint saves none."""
    program, where = Program.drawn(seed), LAYOUTS[layout]
    seed_everything(seed, verbose=False)
    module, logger, callbacks = module_of(program), RecordingLogger(str(folder)), callbacks_of(program, folder)
    saver = callbacks.get("checkpoints")
    extra = [] if checkpoint else [SaveAfter(program.stop, folder / "stopped.ckpt")]
    trainer = Trainer(
        strategy=where.make(),
        devices=where.devices,
        accelerator="cpu" if layout == "single" else ACCELERATOR,
        precision="64-true",
        max_epochs=program.epochs,
        max_steps=program.max_steps,
        global_batch_size=program.global_batch,
        num_sanity_val_steps=program.sanity,
        log_every_n_steps=program.log_every,
        callbacks=[*callbacks.values(), *extra],
        logger=logger,
        enable_checkpointing=saver is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        reload_dataloaders_every_n_epochs=int(program.source == "data module"),
        **program.clip,
        **(program.validation or {}),
    )
    if program.source == "data module":
        trainer.fit(module, datamodule=Data(program), ckpt_path=checkpoint)
    else:
        trainer.fit(module, train_loader(program), val_loaders(program), ckpt_path=checkpoint)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    samples = DataLoader(data(program.val_samples, 9), 2)
    metrics |= {name: float(value) for name, value in trainer.test(module, samples, verbose=False)[0].items()}
    predictions = torch.cat(trainer.predict(module, samples))
    metrics |= {f"prediction {number}": value for number, value in enumerate(predictions.tolist())}
    saved = () if saver is None else (sorted(os.listdir(saver.dirpath)), Path(saver.best_model_path).name)
    return End(
        {name: value.to("cpu", copy=True) for name, value in whole_state(trainer, module).items()},
        sorted(((step, name), float(value)) for step, row in logger.records for name, value in row.items()),
        module.rates,
        (trainer.global_step, trainer.current_epoch),
        metrics,
        saved,
    )


def run_all(jobs, layout):
    """Return the ends of several runs in this process, each of a seed, a folder and a checkpoint or None."""
    warnings.simplefilter("ignore")
    ends = [attempt(run, seed, layout, folder, checkpoint) for seed, folder, checkpoint in jobs]
    return [End(error=end) if isinstance(end, str) else end for end in ends]
