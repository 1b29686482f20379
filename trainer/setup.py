"""Setup of a run: callbacks, loggers, loaders and optimizers."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from traceback import walk_tb

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..callbacks.callback import Callback
from ..callbacks.dispatch import overrides_method
from ..callbacks.helpers.loggers import outlives_disk_errors, tell_loggers
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress import TQDMProgressBar
from ..callbacks.progress_display import ProgressDisplay
from ..callbacks.run import Logger
from ..common.errors import ConfigError, ModuleError
from ..strategies import Strategy
from ..strategies.devices.streams import pins_memory
from ..strategies.module.activation_checkpointing import ActivationCheckpointing
from ..strategies.module.blocks import repeated_blocks
from ..strategies.module.compiled_calls import compile_calls
from ..strategies.module.traces import KeptObjects
from ..strategies.state.optimizer_state import needs_closure
from .checks import check_callbacks, check_loaders, refuse_wrapped
from .data.index_stream import DataRanks
from .data.sample_checks import gather_numbers
from .data.stream import Cut
from .data.train_data import TrainData
from .default_callbacks import omit_pretrained_base
from .folders import mirror_folders, settle_callbacks
from .loggers import BY_NAME, LoggersByName, default_logger
from .loop.schedule import has_validation
from .metrics.gathering import gather_all_once, gather_once
from .module.data_module import DataHooks, DataModule
from .module.hparams import logged_hparams
from .module.optimizers import (
    check_all_registered,
    check_monitors,
    check_parameters,
    parse_optimizers,
    tell_of_several,
    warn_of_shared_parameters,
)
from .module.train_module import TrainModule
from .savings.advisor import TimeAdvisor
from .session.session import Session, take_placed
from .session.settings import Settings
from .unplaced import forget_placed, place_weights

_LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def make_loggers(settings: Settings, root: Path, by_name: LoggersByName = BY_NAME) -> list[Logger]:
    """Return the loggers that the settings ask for, by default TensorBoard below `root`, or a table without it."""
    given = settings.logger
    if isinstance(given, bool):
        return [default_logger(root, by_name)] if given else []
    loggers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [by_name[one](root) if isinstance(one, str) else one for one in loggers]


def make_callbacks(settings: Settings) -> list[Callback]:
    """Return the user's callbacks and the default ones, in the order in which they are called.

    Raises:
        ConfigError: for an object that is not a Callback, and for a callback that another setting switches off.
    """
    given = settings.callbacks
    mine = [] if given is None else [given] if isinstance(given, Callback) else list(given)
    check_callbacks(mine)
    switches: tuple[tuple[str, type[Callback], type[Callback]], ...] = (
        # shows the run; first, so that what others print comes above it
        ("enable_progress_bar", ProgressDisplay, TQDMProgressBar),
        # once, before training
        ("enable_model_summary", ModelSummary, ModelSummary),
        # last, so that it saves what all the others have done at this step
        ("enable_checkpointing", ModelCheckpoint, ModelCheckpoint),
    )
    for name, kind, default in switches:
        own = next((callback for callback in mine if isinstance(callback, kind)), None)
        if own is not None and not getattr(settings, name) and not settings.fast_dev_run:
            raise ConfigError(
                f"Trainer was configured with `{name}=False` but found `{type(own).__name__}` in callbacks; drop one "
                "of them (barebones=True sets it, too)."
            )
        if own is None and getattr(settings, name):
            mine.append(default())
    if settings.enable_advice and not any(isinstance(callback, TimeAdvisor) for callback in mine):
        recomputes = ActivationCheckpointing.of(settings.activation_checkpointing)
        mine.append(TimeAdvisor(recomputes=recomputes, compiles=bool(settings.compile)))
    if settings.fast_dev_run:
        mine = [callback for callback in mine if not isinstance(callback, ModelCheckpoint)]
    return in_order(mine)


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the progress bar first, those that save checkpoints last, and after them the one that measures waits."""

    def rank(callback: Callback) -> int:
        if isinstance(callback, TimeAdvisor):
            return 3
        return 0 if isinstance(callback, ProgressDisplay) else 2 if isinstance(callback, ModelCheckpoint) else 1

    return sorted(callbacks, key=rank)


def with_module_callbacks(callbacks: Sequence[Callback], module: TrainModule) -> list[Callback]:
    """Return the callbacks with those of the module, which replace others of their class."""
    brought = module.configure_callbacks()
    brought = [brought] if isinstance(brought, Callback) else list(brought or [])
    check_callbacks(brought)
    settle_callbacks(brought)
    kinds = {type(callback) for callback in brought}
    return in_order([*(callback for callback in callbacks if type(callback) not in kinds), *brought])


def source_of(kind: str, given: object, datamodule: DataModule | None, module: TrainModule) -> object:
    """Return the loaders passed to the trainer, else the data module's, else the module's; None if there are none."""
    if given is not None:
        return given
    hook = _LOADER_HOOKS[kind]
    for owner in (datamodule, module):
        is_own = owner is not None and (overrides_method(owner, hook, DataHooks) or not callable(getattr(owner, hook)))
        loader = getattr(owner, hook) if is_own else None  # None also switches a loader off
        if loader is not None:
            return loader()
    return None


def load_train_data(session: Session, given: object) -> None:
    """Give a session its training data.

    Raises:
        ModuleError: if there is none.
    """
    settings = session.settings
    source = source_of("train", given, session.datamodule, session.module)
    if source is None and overrides_method(session.module, "train_dataloader", DataHooks):
        raise ModuleError(
            f"{type(session.module).__name__}.train_dataloader must return a loader, got None (is `return` missing?); "
            "return a DataLoader."
        )
    if source is None:
        raise ModuleError(
            f"There is no training loader: {type(session.module).__name__} defines no train_dataloader, and neither "
            "train_dataloaders nor a datamodule with one was passed; pass one to fit()."
        )
    check_loaders(source, "train_dataloaders")
    session.state.data_size = session.state.data_size or session.strategy.data_size
    cut = Cut(
        settings.accumulate_grad_batches,
        settings.global_batch_size,
        _data_ranks(session),
        pins_memory=pins_memory(session.strategy.device),
        is_by_batch=not session.module.automatic_optimization,
    )
    session.train_data = TrainData(
        source,
        seed=session.state.seed,
        cut=cut,
        limit=settings.limit_train_batches,
        in_order=settings.overfit_batches > 0,
        count=session.count,
    )
    session.progress.accumulate_grad_batches = session.train_data.accumulate


def warn_if_endless(session: Session) -> None:
    """Warn if nothing ends a run on data without a length."""
    settings, data = session.settings, session.train_data
    limits = settings.max_epochs, settings.last_step, settings.max_time, settings.max_samples, settings.max_tokens
    has_limit = any(limit is not None for limit in limits)
    if data is not None and data.num_batches == math.inf and not has_limit:
        warnings.warn(
            f"The training loader, a {type(data.source).__name__}, has no length, and the only limit of the run is "
            f"{settings.last_epoch} epochs; set max_epochs, max_steps, max_time or limit_train_batches.",
            stacklevel=2,
        )


def load_evaluation_data(session: Session, kind: str, given: object) -> None:
    """Give a session its evaluation data; in `fit` there may be none.

    Raises:
        ModuleError: if there is none where there must be.
    """
    if session.task == "fit":
        has_step = overrides_method(session.module, "validation_step", TrainModule)
        if session.settings.limit_val_batches == 0 or not has_step:
            if given is not None and not has_step:
                warnings.warn(
                    f"val_dataloaders were passed, but {type(session.module).__name__} defines no validation_step: "
                    "nothing is validated.",
                    stacklevel=2,
                )
            return
    source = source_of(kind, given, session.datamodule, session.module)
    if source is None:
        if session.task == "fit":
            return
        raise ModuleError(
            f"There is no loader to {kind}: {type(session.module).__name__} defines no {_LOADER_HOOKS[kind]}, and "
            f"neither dataloaders nor a datamodule with one was passed; pass one to {kind}()."
        )
    check_loaders(source, "val_dataloaders" if session.task == "fit" else "dataloaders")
    name = "val" if kind == "validate" else kind
    limit = getattr(session.settings, f"limit_{name}_batches")
    in_order = session.task == "fit" and session.settings.overfit_batches > 0
    from .data.evaluation_data import EvaluationData

    session.evaluation_data = EvaluationData.of(
        source, limit, kind, in_order=in_order, ranks=_data_ranks(session), seed=session.state.seed
    )


def _data_ranks(session: Session) -> DataRanks:
    """Return which ranks read the data."""
    strategy = session.strategy
    return DataRanks(
        strategy.data_rank,
        strategy.data_size,
        planned_size=session.state.data_size,
        is_dealing=session.settings.use_distributed_sampler,
        agree=partial(gather_numbers, strategy) if strategy.data_size > 1 else None,
        share=strategy.ranks.all.broadcast if strategy.world_size > 1 else None,
    )


def check_interval(session: Session) -> None:
    """Check that an epoch is long enough for its first validation.

    Raises:
        ConfigError: if it is not.
    """
    data, interval = session.train_data, session.settings.val_check_interval
    assert data is not None
    if not data.num_batches or not has_validation(session) or session.settings.check_val_every_n_epoch is None:
        return
    if isinstance(interval, float) and interval != 1.0 and data.num_batches == math.inf:
        raise ConfigError(
            f"val_check_interval={interval} is a fraction, but the training loader has no length; give batches as an "
            "int, or a duration."
        )
    if isinstance(interval, int) and interval > data.planned_batches:
        raise ConfigError(
            f"val_check_interval={interval} must be less than or equal to the number of the training batches, "
            f"{data.planned_batches}, or it is never reached in an epoch; lower it, or give "
            "check_val_every_n_epoch=None to count batches across epochs."
        )


def build_optimizers(session: Session) -> None:
    """Ask the module for its optimizers, over the parameters as the strategy has left them.

    Raises:
        ModuleError: if ``configure_optimizers`` returns something else.
    """
    module, strategy = session.module, session.strategy
    try:
        returned = module.configure_optimizers()
    except TypeError as error:
        error.add_note("An optimizer takes parameters, such as self.parameters(), and numbers: lr=0.1, not '0.1'.")
        raise
    except NotImplementedError as error:
        if any(frame.f_code is LRScheduler.get_lr.__code__ for frame, _ in walk_tb(error.__traceback__)):
            error.add_note("LRScheduler is the base of schedulers; make one of them, such as StepLR(optimizer, 10).")
        raise
    if returned is None and module.automatic_optimization and any(p.requires_grad for p in module.parameters()):
        warnings.warn(
            f"{type(module).__name__}.configure_optimizers returned None, and this fit will run with no optimizer: "
            "nothing is trained; return an optimizer (is `return` missing?), or [] to train without one.",
            stacklevel=2,
        )
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if returned and frozen and len(frozen) == sum(1 for _ in module.parameters()):
        warnings.warn(
            f"All {len(frozen)} parameters of {type(module).__name__} are frozen, such as {frozen[0]!r}: nothing is "
            "trained; call requires_grad_() on those to train.",
            stacklevel=2,
        )
    configured = parse_optimizers(returned)
    check_parameters(configured.optimizers, module)
    if module.automatic_optimization:
        if strategy.rank == 0:
            tell_of_several(configured.optimizers, module)
        warn_of_shared_parameters(configured.optimizers, module)
        check_monitors(configured.schedulers)
    evaluating = [type(optimizer).__name__ for optimizer in configured.optimizers if needs_closure(optimizer)]
    if evaluating and strategy.precision.uses_scaler:
        raise ConfigError(
            f"precision={strategy.precision.name!r} scales gradients, but an optimizer that evaluates the loss itself "
            f"({evaluating}) needs them unscaled; use bf16-mixed or 32-true."
        )
    session.placed.take_optimizers(configured.optimizers)
    is_saved = any(isinstance(callback, ModelCheckpoint) for callback in session.callbacks)
    check_all_registered(configured.optimizers, module, num_ranks=strategy.world_size, is_saved=is_saved)
    session.optimizers, session.schedulers = configured.optimizers, configured.schedulers
    if not session.state.optimizer_steps:  # a resumed run has them already
        session.state.optimizer_steps = [0] * len(configured.optimizers)


def warn_of_late_parameters(session: Session, known: set[nn.Parameter]) -> None:
    """Warn of parameters that were added to the module after its optimizers were made, and that no optimizer has."""
    groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
    known = known.union(*(group["params"] for group in groups))
    late = [name for name, parameter in session.module.named_parameters() if parameter not in known]
    if late:
        warnings.warn(
            f"{', '.join(late[:3])}{' ...' if late[3:] else ''} of {type(session.module).__name__} was added after "
            "configure_optimizers and is in no optimizer, so it is not trained; create it in __init__ or "
            "configure_model.",
            stacklevel=2,
        )


def _prepares_data(strategy: Strategy, owner: DataHooks) -> bool:
    return strategy.local_rank == 0 if owner.prepare_data_per_node else strategy.rank == 0


def set_up(session: Session) -> None:
    """Call the hooks that prepare the data and build the module."""
    datamodule, module, stage = session.datamodule, session.module, session.task
    mirror_folders(session)
    forget_placed(module)
    for owner in (datamodule, module):
        if owner is not None and _prepares_data(session.strategy, owner):
            owner.prepare_data()
    session.strategy.ranks.all.barrier()
    if datamodule is not None:
        datamodule.setup(stage)
    if stage == "fit":
        for callback in session.callbacks:  # the module's callbacks are known only here
            callback.check_strategy(session.strategy, session.strategy.world_size, len(session.strategy.devices))
    session.hooks.call("setup", stage)
    with session.strategy.init_context():
        module.configure_model()
    if stage == "fit":
        omit_pretrained_base(session)


def set_up_module(session: Session) -> None:
    """Convert and compile the module as configured, and let the strategy place it."""
    refuse_wrapped(session.module)
    sharers = session.strategy.ranks.loss
    if session.settings.sync_batchnorm and sharers.world_size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(session.module, sharers.device_group)
    gather_all_once(session.strategy)
    if "torchmetrics" in sys.modules:
        reached = KeptObjects()
        reached.keep(session.module)  # a metric in a plain list or dict is not a submodule
        for part in reached.modules:
            gather_once(part, session.strategy)
    compiled = session.settings.compile
    if compiled:
        # where ranks communicate between blocks, each block is compiled by itself; they share the code
        by_blocks = session.strategy.forward_is_collective
        blocks = [block for _, block in repeated_blocks(session.module)] if by_blocks else []
        _compile_in_place(session.module, blocks, {} if compiled is True else dict(compiled))
    is_manual = session.task == "fit" and not session.module.automatic_optimization
    take_placed(session, session.strategy.place(session.module, is_manual=is_manual))
    place_weights(session.module, session.strategy)


def _compile_in_place(module: nn.Module, blocks: Sequence[nn.Module], options: dict[str, object]) -> None:
    """Compile the blocks, if any, else ``forward`` if the module has one, else each child; names do not change."""
    for part in blocks or ([module] if overrides_method(module, "forward", nn.Module) else module.children()):
        compile_calls(part, partial(torch.compile, **options))


def log_hparams_and_graph(session: Session, *, is_resumed: bool) -> None:
    """Send the hyperparameters and the graph to the loggers, on rank 0."""
    hparams = logged_hparams(session.module, session.datamodule) if session.settings.enable_autolog_hparams else {}
    # a forward that communicates cannot be traced on one rank alone
    example = None if session.strategy.forward_is_collective else session.module.example_input_array
    if is_resumed:
        tell_loggers(session.loggers, "resume_at", session.state.global_step)
    if hparams:
        for logger in session.loggers:
            with outlives_disk_errors(logger):
                logger.log_hyperparams(hparams)
    if example is not None:
        wanting = [logger for logger in session.loggers if getattr(logger, "wants_graph", True)]
        tell_loggers(wanting, "log_graph", session.module, example)
