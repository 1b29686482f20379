"""State of a run as one dictionary: taking it at a step boundary, and loading it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Final, TypeVar

from torch.optim import Optimizer

from ...callbacks.dispatch import Hooks, callback_states, load_callback_states
from ...common.errors import CheckpointError, EchelonError
from ...strategies import Strategy
from ...strategies.state.omitted_weights import OMITTED, complete_state, note_changed
from ...strategies.state.optimizer_groups import Sources
from ...strategies.state.optimizer_state import group_sources, match_optimizers
from ..checkpoint.saved_state import FORGED, NAMES_FOR_HOOKS, explain_bad_part, unfit_part_error
from ..data.seed import derive_seed, restore_rng, seed_devices, seed_generators
from ..loggers.base import folder_runs
from ..loggers.tracker import tracker_runs
from ..loop.schedule import num_steps
from ..module.data_module import DataModule
from ..module.hparams import is_omegaconf, saved_hparams
from ..module.hparams_json import to_jsonable
from ..module.load import as_hooks_see
from ..module.optimizers import LRSchedulerConfig
from ..module.train_module import TrainModule
from ..module.unresolved import containers_in
from ..session.session import Session
from ..session.train_state import TrainState
from .changed_settings import Winner, load_groups, load_scheduler
from .dequantized import note_dequantized
from .matching import changed_order, match_schedulers, optimizers_of_schedulers
from .schedules import schedule_state

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PARTS: Final = {name: part for part, name in NAMES_FOR_HOOKS.items()}


def take_state(session: Session, *, weights_only: bool) -> dict[str, object]:
    """Return everything that a resumed run needs, under the names of Lightning's checkpoints where they exist.

    ``on_save_checkpoint`` of callbacks and module may add to it. Only the state of strategies, loaders and generators
    differs between ranks; callbacks and loss scale are the same on all, and rank 0's are saved. Collective: every rank
    calls it.
    """
    session.replicas.sync()
    state = module_state(session.module, session.placed.model_state())
    if not weights_only:
        state.update(training_state(session))
    return shown_to_hooks(state, session.hooks, session.state)


def module_state(module: TrainModule, weights: dict[str, object]) -> dict[str, object]:
    """Return what is needed to build a module again: its weights and hyper-parameters."""
    hyper_parameters, omitted = to_jsonable(saved_hparams(module))
    return {
        "state_dict": weights,
        "hyper_parameters": hyper_parameters,
        "hyper_parameters_argument": module.hparams_argument,
        "omitted_hyper_parameters": omitted,
        "hyper_parameters_type": "omegaconf" if is_omegaconf(module.hparams) else None,
        "hyper_parameters_containers": containers_in(module.hparams),
    }


def _arguments_of(datamodule: DataModule | None) -> dict[str, Any]:
    """Return what is needed to build a data module again, if there is one."""
    hparams = {} if datamodule is None else datamodule.hparams
    return {
        "datamodule_hyper_parameters": {} if datamodule is None else to_jsonable(saved_hparams(datamodule))[0],
        "datamodule_hyper_parameters_argument": None if datamodule is None else datamodule.hparams_argument,
        "datamodule_hyper_parameters_type": "omegaconf" if is_omegaconf(hparams) else None,
        "datamodule_hyper_parameters_containers": containers_in(hparams),
    }


def shown_to_hooks(state: dict[str, object], hooks: Hooks, counters: TrainState) -> dict[str, object]:
    """Let ``on_save_checkpoint`` add to a state, and return it under the names of the files."""
    state.update(epoch=counters.epoch, global_step=counters.global_step)  # for the hooks; "loop" holds them
    for hook in hooks.on_save_checkpoint:
        returned = hook(state)
        if returned is not None and returned is not state:
            name = getattr(getattr(hook, "func", hook), "__qualname__", "on_save_checkpoint")
            warnings.warn(
                f"{name} returned {type(returned).__name__} ({returned!r:.60}), which no checkpoint holds: write it "
                "into the dict, as checkpoint['mine'] = ..., or return it from state_dict of the callback.",
                stacklevel=2,
            )
    del state["epoch"], state["global_step"]
    return {_PARTS.get(name, name): value for name, value in state.items()}


def training_state(session: Session) -> dict[str, object]:
    """Return what a resumed run needs beside the module, under Lightning's names. Collective: every rank calls it."""
    assert session.train_data is not None
    datamodule = session.datamodule
    strategy = session.strategy
    own = session.train_data.state_dict(), session.streams.state_dict(strategy.devices)
    data, rng = zip(*of_data_ranks(strategy, own), strict=True)
    session.state.seconds = session.interruption.elapsed()
    return {
        "optimizer_states": [session.placed.optimizer_state(optimizer) for optimizer in session.optimizers],
        "lr_schedulers": [schedule_state(config.scheduler) for config in session.schedulers],
        "lr_scheduler_optimizers": optimizers_of_schedulers(session),
        "precision": session.placed.scaling.scaler.state_dict(),
        "loop": session.state.state_dict(),
        "data": list(data),
        "datamodule": datamodule.state_dict() if datamodule is not None else {},
        **_arguments_of(datamodule),
        "metrics": session.metrics.state_dict(),
        "callbacks": callback_states(session.callbacks),
        "loggers": [*tracker_runs(session.loggers), *folder_runs(session.loggers[1:])],
        "rng": list(rng),
    }


def of_data_ranks(strategy: Strategy, own: T) -> list[T]:
    """Return the value of each data rank, for a checkpoint. Collective: every rank calls it.

    Ranks that share a replica have the same value; a data rank's is that of its first rank.
    """
    by_data_rank = dict(reversed(strategy.ranks.gather_objects(own)))
    return [by_data_rank[data_rank] for data_rank in range(strategy.data_size)]


def still_parts(session: Session) -> set[str]:
    """Return the entries of a state that do not change until the optimizers step; forward may change buffers."""
    has_buffers = next(session.module.buffers(), None) is not None
    return {"optimizers"} if has_buffers else {"optimizers", "model"}


def load_weights(session: Session, saved: Mapping[str, object]) -> None:
    """Let the hooks see (and change) the loaded state, and load the weights. Collective: every rank calls it.

    Raises:
        CheckpointError: if the weights do not fit the module.
    """
    state = as_hooks_see(saved)
    read = set(state["state_dict"])
    if state.get(OMITTED):
        collectives, own = session.strategy.ranks.all, session.placed.model_state()
        with collectives.fail_together():
            state["state_dict"] = complete_state(state["state_dict"], state[OMITTED], own, collectives)
    session.hooks.call("on_load_checkpoint", state)
    try:
        session.placed.load_model_state(state["state_dict"], strict=session.module.strict_loading)
    except RuntimeError as error:
        where = "the checkpoint" if session.resumed_from is None else session.resumed_from
        from ..checkpoint import compare_weights

        raise CheckpointError(
            f"The weights in {where} do not fit {type(session.module).__name__}; build the module as it was, or set "
            "strict_loading = False on it; if they are another program's, give this one its own default_root_dir.\n"
            f"{compare_weights(session.module, state['state_dict']) or error}"
        ) from error
    note_changed(session.module, read)
    note_dequantized(session, "model", state["state_dict"])


def load_position(session: Session, state: Mapping[str, Any]) -> None:
    """Restore the counters and the seed of the sample order, before loaders are requested.

    Raises:
        CheckpointError: if the checkpoint holds only weights.
    """
    if "loop" not in state:
        raise CheckpointError(
            f"The checkpoint holds weights only ({sorted(state)}), no state to resume from; "
            "load them with load_from_checkpoint and start a new fit."
        )
    session.state.load_state_dict(state["loop"])
    session.metrics.position = session.state.global_step


def load_training(session: Session, state: Mapping[str, Any], winner: Winner = "saved") -> None:
    """Restore a run to the state that `take_state` returned. Collective: every rank calls it.

    Args:
        session: the run, with its data and optimizers built.
        state: the loaded state.
        winner: which settings of optimizers and schedulers to use where they differ; differences are logged.

    Raises:
        CheckpointError: if the checkpoint has different optimizers or schedulers than the run.
    """
    assert session.train_data is not None
    _check_number("optimizers", len(session.optimizers), len(state["optimizers"]))
    _check_number("schedulers", len(session.schedulers), len(state["lr_schedulers"]))
    _load_optimizers(session, state, winner)
    if state["precision"]:
        with explain_bad_part("precision"):
            session.placed.scaling.scaler.load_state_dict(state["precision"])
    loop, data = session.state, of_this_rank(session.strategy, state["data"])
    if loop.loaded_in.get("train", 0) <= loop.epoch:  # otherwise the loaders are those of the next epoch
        with explain_bad_part("data"):
            loop.batches_in_epoch = session.train_data.resume_epoch(
                loop.epoch, data, loop.batches_in_epoch, state["data"]
            )
    if session.datamodule is not None:
        session.datamodule.load_state_dict(state["datamodule"])
    session.metrics.load_state_dict(state["metrics"])
    without_owner = load_callback_states(session.callbacks, state["callbacks"])
    if without_owner and session.strategy.rank == 0:
        _log.warning("The checkpoint holds the state of callbacks that this run lacks: %s.", ", ".join(without_owner))


def of_this_rank(strategy: Strategy, saved: Sequence[T]) -> T:
    """Return what this data rank saved; if their number has changed, what the first data rank saved."""
    return saved[strategy.data_rank if len(saved) == strategy.data_size else 0]


def load_generators(session: Session, state: Mapping[str, Any]) -> None:
    """Restore this rank's random generators, as the last thing before training continues.

    They are those of its data rank; a data rank that the saved run did not have begins a stream of its own.
    """
    strategy, saved = session.strategy, state["rng"]
    common = saved[0].get("hooks", saved[0])
    if not session.streams.is_parted and not common.get("is_apart"):
        saved = [common]  # what one process has where its steps draw nothing
    with session.streams:
        put_generators_back(strategy, saved, session.state.seed, session.state.global_step)
    if session.streams.is_parted:
        with explain_bad_part("rng"):
            session.streams.load_common(common)


def put_generators_back(strategy: Strategy, saved: Sequence[Mapping[str, object]], seed: int, step: int) -> None:
    """Restore the generators of this data rank, or seed them from `seed` and `step` if they were not saved."""
    rank = strategy.data_rank
    # -1 takes the place of the epoch in the keys of a run's other streams
    seed_devices(strategy.devices, derive_seed(seed, -1, step), rank)
    if rank < len(saved):
        with explain_bad_part("rng"):
            restore_rng(saved[rank], strategy.devices)
    else:
        seed_generators(derive_seed(seed, -1, rank, step))


def _check_number(what: str, here: int, saved: int) -> None:
    if here != saved:
        raise CheckpointError(
            f"configure_optimizers returned {here} {what}, the checkpoint holds {saved}; return as many as were saved."
        )


def _load_optimizers(session: Session, state: Mapping[str, Any], winner: Winner) -> None:
    scheduled = [config.scheduler.optimizer for config in session.schedulers if hasattr(config.scheduler, "optimizer")]
    differences = []
    module, steps = session.placed.module, session.state.optimizer_steps
    with explain_bad_part("optimizers"):
        order = match_optimizers(session.optimizers, module, state["optimizers"])
        if len(steps) == len(order):
            session.state.optimizer_steps = [steps[saved] for saved in order]
        sources: dict[object, Sources] = {}
        for optimizer, saved in zip(session.optimizers, [state["optimizers"][index] for index in order], strict=True):
            before = [dict(group) for group in optimizer.param_groups]
            session.placed.load_optimizer_state(optimizer, saved)
            differences += load_groups(optimizer, before, optimizer in scheduled, winner)
            sources[optimizer] = changed_order(group_sources(optimizer, module, saved), len(saved["param_groups"]))
    note_dequantized(session, "optimizers", state["optimizers"])
    configured = [getattr(config.scheduler, "total_steps", None) for config in session.schedulers]
    with explain_bad_part("lr_schedulers"):
        for config, index in zip(session.schedulers, match_schedulers(session, state, order), strict=True):
            groups = sources.get(getattr(config.scheduler, "optimizer", None), ())
            differences += load_scheduler(config.scheduler, state["lr_schedulers"][index], winner, groups)
    for config, total in zip(session.schedulers, configured, strict=True):
        _refuse_short(session, config, total)
    if differences and session.strategy.rank == 0:
        other = "configured" if winner == "saved" else "saved"
        _log.warning(
            "The checkpoint was saved with other settings; the %s ones are used:\n  %s\n"
            "Pass fit(..., optimizer_settings=%r) for the %s ones.",
            winner,
            "\n  ".join(differences),
            other,
            other,
        )


def _refuse_short(session: Session, config: LRSchedulerConfig, configured: object) -> None:
    """Refuse a saved schedule that would end before this run, such as a OneCycleLR, where a longer one is configured.

    Raises:
        CheckpointError: if it would.
    """
    schedule, settings, state = config.scheduler, session.settings, session.state
    saved = getattr(schedule, "total_steps", None)
    if not (isinstance(saved, int) and isinstance(configured, int) and saved < configured):
        return
    if not session.module.automatic_optimization:
        return
    assert session.train_data is not None
    if config.interval == "step":
        left = num_steps(session, session.train_data) - state.global_step
    else:
        left = math.inf if settings.last_epoch is None else settings.last_epoch - state.current_epoch
    if schedule.last_epoch + left / max(config.frequency, 1) > saved:
        raise CheckpointError(
            f"The saved {type(schedule).__name__} has total_steps={saved}, and would end before this run does; to go "
            f"on with the configured one, of total_steps={configured}, pass optimizer_settings='configured' to fit (to "
            "the command: optimizer_settings=configured), or do not train for longer."
        )


@contextmanager
def first_step_of(counters: TrainState) -> Iterator[None]:
    """Turn an optimizer's error in the first step after its state was loaded into an error that says so.

    The state that an optimizer keeps for each parameter is its own: only a step shows whether all of it is there.

    Raises:
        CheckpointError: for such an error.
    """
    began_at = counters.global_step
    try:
        yield
    except FORGED as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        is_of_optimizer = any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames)
        if isinstance(error, EchelonError) or counters.global_step != began_at or not is_of_optimizer:
            raise
        raise unfit_part_error("optimizers", error) from error
