"""Programs drawn at random: what a module, data, callbacks and a trainer may be together, and how a run ends."""

import os
import random
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from as_rank import attempt
from matrix import whole_state
from random_data import ORDERS, SOURCES, WHOLE, Data, data, train_loader, val_loaders
from random_modules import METRICS, OPTIMIZERS, OWN, SCHEDULES, module_of
from recording_logger import RecordingLogger
from torch.utils.data import DataLoader
from unusual_modules import LAYOUTS as UNUSUAL_LAYOUTS
from unusual_modules import Layout

from echelon import (
    BaseFinetuning,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    ElasticStrategy,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    SampleLedger,
    StochasticWeightAveraging,
    ThroughputMonitor,
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

LAUNCHED = {
    "ddp x 2, started": Layout("ddp x 2, started", 1, lambda: "ddp", devices=2),
    "elastic x 2": Layout("elastic x 2", 1, partial(ElasticStrategy, snapshot_every=2), devices=2),
    "elastic fsdp x 2": Layout("elastic fsdp x 2", 1, partial(ElasticStrategy, "fsdp", snapshot_every=2), devices=2),
}
"""Those whose ranks the trainer starts itself."""

ACCELERATOR = os.environ.get("ECHELON_TEST_DEVICE", "cpu")
"""That of every layout but `single`, with which they are compared."""

CALLBACKS = (
    *("average of steps", "average of epochs", "checkpoints", "stopping", "rates", "freezing"),
    *("unfreezing", "stopping by validation", "accumulation by epoch", "samples", "throughput", "devices"),
)
MEASURED = ("DeviceStatsMonitor/", "throughput/")
"""How the names of values begin that differ from run to run."""
DATA_RANKS = {"hsdp 2 x 2": 4, "tp 2 x fsdp 2": 2, "pp 2 x fsdp 2": 2, "tp x 2": 1, "pp x 2": 1}
"""How many ranks read data of their own, where it is not each process."""


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
    returns_dict: bool
    is_manual: bool
    """Whether the step updates two optimizers itself, with the batches of one rank."""
    classes: bool
    """Whether the loss is a mean over targets, of which samples have different numbers."""
    whole: str | None
    """Where batches stay whole, what gives them."""
    combined: str | None
    """The mode in which two loaders are read as one."""
    is_configured: bool
    """Whether layers are built in `configure_model`."""
    has_state: bool
    """Whether the loss depends on a buffer and on what the module saves itself."""
    min_epochs: int
    min_steps: int
    limit_val: int | float
    flags: dict
    validates_first: bool
    fits_again: bool
    saves_weights_only: bool
    monitor: str | None
    save_last: bool | str

    @classmethod
    def drawn(cls, seed):
        """Return the program of a seed."""
        draw = random.Random(seed)
        batch, is_manual = draw.choice((1, 2, 3)), draw.random() < 0.15
        global_batch = batch * draw.choice((2, 4, 8)) + draw.choice((0, 0, 0, 1))
        if is_manual:
            global_batch = 12 * draw.choice((1, 2))  # for 1, 2, 3 or 4 ranks
        known = cls._drawn(draw, seed, batch, global_batch, is_manual)
        most = known.max_steps if known.max_steps > 0 else known.min_steps
        known = replace(known, min_epochs=min(known.min_epochs, known.epochs), min_steps=min(known.min_steps, most))
        if known.last_epoch is not None:  # a resumed run does not know that it was to end
            known = replace(known, min_epochs=0, min_steps=0)
        return known if is_manual else replace(known, **cls._drawn_data(draw, known))

    def is_left_out(self, layout):
        """Return whether a layout trains the program in another way, by what its documentation says.

        In a pipeline, the last stage alone has what the step returned beside its loss, and a step calls the blocks
        once. What a step reads where one of several loaders ends depends on the number of ranks that read data.
        """
        asks_for_outputs = self.returns_dict and "on_train_batch_end" in self.overrides
        has_several_loaders = self.combined is not None
        if layout.startswith("pp"):
            return asks_for_outputs or has_several_loaders
        return has_several_loaders and data_ranks_of(layout) > 1

    @classmethod
    def _drawn(cls, draw, seed, batch, global_batch, is_manual):
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
            overrides=tuple(name for name in OWN if draw.random() < 0.12),
            last_epoch=draw.choice((None, None, None, draw.randint(0, 1))),
            returns_dict=draw.random() < 0.2,
            is_manual=is_manual,
            classes=draw.random() < 0.35,
            whole=None,
            combined=None,
            is_configured=draw.random() < 0.2,
            has_state=draw.random() < 0.3,
            min_epochs=draw.choice((0, 0, 2)),
            min_steps=draw.choice((0, 0, 4)),
            limit_val=draw.choice((1.0, 1.0, 1.0, 2, 1)),
            flags=draw.choice(({}, {}, {"deterministic": True}, {"detect_anomaly": True}, {"inference_mode": False})),
            validates_first=draw.random() < 0.15,
            fits_again=draw.random() < 0.15,
            saves_weights_only=draw.random() < 0.5,
            monitor=draw.choice(("reduced", "reduced", "reduced", None, "step")),
            save_last=draw.choice((True, True, True, False, "link")),
        )

    @staticmethod
    def _drawn_data(draw, known):
        """Return the fields of a program whose batches stay whole, or no other ones."""
        whole = draw.choice((None, None, None, "batch sampler", "stream", "list"))
        combined = draw.choice((None, None, "min_size", "max_size", "max_size_cycle", "sequential"))
        samples = draw.randint(WHOLE * known.batch, 4 * WHOLE * known.batch)
        if whole is None:
            return {}
        size = WHOLE * known.batch
        return {"whole": whole, "combined": combined, "samples": samples, "global_batch": size}


class Counting(Callback):
    """Counts the steps for a module, before what saves it."""

    def on_train_step_end(self, trainer, module):
        module.steps_trained += 1


class SaveAfter(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            self.step = None
            trainer.save_checkpoint(self.path)


class Unfreezing(BaseFinetuning):
    """Trains the embedding from the second epoch on, at a rate of its own."""

    def freeze_before_training(self, module):
        self.freeze(module.embed)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1 and optimizer is module.trainer.optimizers[0]:
            self.unfreeze_and_add_param_group(module.embed, optimizer, lr=0.03)


def callbacks_of(program, folder, data_ranks):
    """Return the callbacks of a program by their names."""
    each = WHOLE // data_ranks
    makers = {
        "average of steps": partial(EMAWeightAveraging, decay=0.7),
        "average of epochs": partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1),
        "checkpoints": partial(
            ModelCheckpoint,
            folder / "checkpoints",
            "{epoch}-{step}",
            monitor=program.monitor,
            save_last=program.save_last,
            save_top_k=1 if program.monitor is None and program.top_k > 1 else program.top_k,
            mode="max" if program.monitor == "step" else None,
            **program.every,
        ),
        "stopping": partial(EarlyStopping, "reduced", patience=1, mode="max"),
        "stopping by validation": partial(EarlyStopping, "val", patience=0, min_delta=0.05, strict=False),
        "rates": LearningRateMonitor,
        "accumulation by epoch": partial(GradientAccumulationScheduler, {0: each, 1: 2 * each, 2: each}),
        "samples": SampleLedger,
        "throughput": ThroughputMonitor,
        "devices": DeviceStatsMonitor,
        "unfreezing": Unfreezing,
        "freezing": partial(
            LambdaCallback,
            on_train_epoch_start=lambda trainer, module: module.embed.requires_grad_(trainer.current_epoch != 1),
        ),
    }
    names = dict.fromkeys(program.callbacks)
    if "average of steps" in names:
        names.pop("average of epochs", None)
    if program.whole is None:  # a global batch is set instead
        names.pop("accumulation by epoch", None)
    if program.is_manual:  # it takes one optimizer
        names.pop("average of epochs", None)
    if "unfreezing" in names:
        names.pop("freezing", None)
    if "optimizer_zero_grad" in program.overrides:  # gradients of 0 move frozen weights, and no checkpoint has them
        names.pop("freezing", None)
    if program.is_configured:  # no layer is there when what is frozen is chosen
        names.pop("unfreezing", None)
    # LBFGS has one group, and schedules of torch that keep the rates of each fail with a new one
    if program.optimizer == "lbfgs" or program.schedule in ("restarts", "one cycle", "by a function", "cycles"):
        names.pop("unfreezing", None)
    return {name: makers[name]() for name in names}


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
    program = Program.drawn(seed)
    # micro-batches are those of a rank of the run that goes on
    data_ranks = data_ranks_of(layout if checkpoint is None else checkpoint.parent.name)
    seed_everything(seed, verbose=False)
    module, logger = module_of(program), RecordingLogger(str(folder))
    callbacks = callbacks_of(program, folder, data_ranks)
    saver = callbacks.get("checkpoints")
    extra = [Counting()] if checkpoint else [Counting(), SaveAfter(program.stop, folder / "stopped.ckpt")]
    trainer = trainer_of(program, layout, folder, data_ranks, callbacks, extra, logger)
    before = {}
    if program.validates_first and program.validation is not None:
        before = trainer.validate(module, val_loaders(program), verbose=False)[0]
    is_of_one = checkpoint is not None and checkpoint.parent.name == "single"  # its loader is cut for more ranks
    fit(trainer, module, program, checkpoint, num_ranks=1 if is_of_one else data_ranks_of(layout))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {f"before, {name}": float(value) for name, value in before.items()}
    samples = DataLoader(data(program.val_samples, 9), 2)
    metrics |= {name: float(value) for name, value in trainer.test(module, samples, verbose=False)[0].items()}
    predictions = torch.cat(trainer.predict(module, samples))
    metrics |= {f"prediction {number}": value for number, value in enumerate(predictions.tolist())}
    saved = () if saver is None else kept_by(saver)
    weights = copied(whole_state(trainer, module))
    trainer.save_checkpoint(folder / "end.ckpt", weights_only=program.saves_weights_only)
    loaded = type(module).load_from_checkpoint(folder / "end.ckpt", program=program).state_dict()
    weights |= {f"loaded {name}": value for name, value in loaded.items()}
    if program.fits_again:
        settings = settings_of(program, layout, folder, data_ranks_of(layout), ())
        again = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **settings)
        again.fit(module, datamodule=Data(program, data_ranks_of(layout)))
        weights |= {f"again {name}": value for name, value in copied(whole_state(again, module)).items()}
    rows = [((step, name), value) for step, row in logger.records for name, value in row.items()]
    return End(weights, rows_of(rows), module.rates, (trainer.global_step, trainer.current_epoch), metrics, saved)


def trainer_of(program, layout, folder, data_ranks, callbacks, extra, logger):
    """Return the trainer that fits a program with its callbacks, and others behind them."""
    return Trainer(
        max_epochs=program.epochs,
        max_steps=program.max_steps,
        min_epochs=program.min_epochs,
        min_steps=program.min_steps,
        num_sanity_val_steps=program.sanity,
        limit_val_batches=program.limit_val,
        callbacks=[*callbacks.values(), *extra],
        logger=logger,
        enable_checkpointing="checkpoints" in callbacks,
        **settings_of(program, layout, folder, data_ranks, callbacks),
        **(program.validation or {}),
    )


def settings_of(program, layout, folder, data_ranks, callbacks):
    """Return the settings of each trainer of a program, with some callbacks by their names."""
    where = (LAYOUTS | LAUNCHED)[layout]
    return {
        "strategy": where.make(),
        "devices": where.devices,
        "accelerator": "cpu" if layout == "single" else ACCELERATOR,
        "precision": "64-true",
        "log_every_n_steps": program.log_every,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "reload_dataloaders_every_n_epochs": int(has_data_module(program)),
        **program.flags,
        **step_of(program, data_ranks, callbacks),
        **({} if program.is_manual else program.clip),
    }


def has_data_module(program):
    """Return whether the data of a program comes from a data module."""
    return program.is_manual or program.source == "data module"


def fit(trainer, module, program, ckpt_path, num_ranks):
    """Train a program, from a checkpoint on if there is one; in manual optimization a step has batches of all ranks."""
    if has_data_module(program):
        trainer.fit(module, datamodule=Data(program, num_ranks), ckpt_path=ckpt_path)
    else:
        trainer.fit(module, train_loader(program), val_loaders(program), ckpt_path=ckpt_path)


def kept_by(saver):
    """Return the names of the checkpoints that are left, and of the best."""
    folder = Path(saver.dirpath)
    return sorted(os.listdir(folder)) if folder.exists() else [], Path(saver.best_model_path).name


def rows_of(logged):
    """Return what loggers got, without the values that differ from run to run."""
    return sorted((key, 0.0 if key[1].startswith(MEASURED) else float(value)) for key, value in logged)


def copied(state):
    """Return copies of tensors on the CPU, which no later fit trains."""
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


def data_ranks_of(layout):
    """Return how many ranks of a layout read data of their own."""
    return 2 if layout in LAUNCHED else DATA_RANKS.get(layout, LAYOUTS[layout].processes)


def step_of(program, data_ranks, callbacks):
    """Return the settings that say which batches make a step."""
    if program.is_manual:
        return {}
    if program.whole is None:
        return {"global_batch_size": program.global_batch}
    return {} if "accumulation by epoch" in callbacks else {"accumulate_grad_batches": WHOLE // data_ranks}


def run_all(jobs, layout):
    """Return the ends of several runs in this process, each of a seed, a folder and a checkpoint or None."""
    warnings.simplefilter("ignore")
    ends = [attempt(run, seed, layout, folder, checkpoint) for seed, folder, checkpoint in jobs]
    return [End(error=end) if isinstance(end, str) else end for end in ends]
