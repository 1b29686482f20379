"""Check that a checkpoint can hold the state of a run, long before the first one is written."""

from __future__ import annotations

from collections.abc import Callable

from ...callbacks.callback import Callback
from ...callbacks.dispatch import callback_states, overrides_method
from ...callbacks.model_checkpoint import ModelCheckpoint
from ...callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from ...common.errors import CheckpointError, EchelonError
from ...strategies.state.dtensor import check_whole, describe_if_unfit, is_wrapper
from ...strategies.state.optimizer_state import needs_closure, optimizer_parameters, parameter_names
from ..checkpoint.encoding import Encoder
from ..data.seed import isolated_rng
from ..module.train_module import TrainModule
from ..session.session import Session
from .run_state import take_state
from .schedules import schedule_state
from .staging_room import check_room


def check_savable(session: Session) -> None:
    """Encode what a checkpoint would hold, without copying tensors. Collective: every rank calls it.

    In a run that saves no checkpoints, it only checks that the weights can be returned to the caller of processes that
    the run has started. ``on_save_checkpoint`` is called only if the module's state cannot be saved as it is, since the
    hook may leave parts of it out.

    Raises:
        CheckpointError: for a value that a checkpoint cannot hold, with its place and what to do.
        ConfigError: if the state is staged on a disk that has no room for it.
        ModuleError: for shards of weights that cannot be put together.
    """
    if session.strategy.launcher.starts_processes:
        with session.strategy.ranks.all.fail_together():
            check_whole(dict(session.module.named_parameters()))
    saves_training = _saves_checkpoints(session, weights_only=False)
    if not (saves_training or _saves_checkpoints(session, weights_only=True)):
        return
    if session.strategy.ranks.stage.world_size > 1:
        _check_stages(session)
    weights = session.placed.model_state()
    optimizers = [session.placed.optimizer_state(each) for each in session.optimizers] if saves_training else []
    collectives = session.strategy.ranks.all
    unfit = _find_fault({"model": dict(weights), "optimizers": optimizers})
    asks_hooks = collectives.all_reduce(float(unfit is not None), "max") and _has_hooks(session)
    if asks_hooks:
        state = take_state(session, weights_only=not saves_training)
        unfit = _find_fault({name: state.get(name) for name in ("model", "optimizers")})
    with collectives.fail_together(), isolated_rng():
        if unfit is not None:
            raise unfit
        check_room(session, {"model": weights, "optimizers": optimizers})
        if saves_training:
            _check_parts(session)
            _check_first_states(session)


def _check_parts(session: Session) -> None:
    parts: dict[str, Callable[[], object]] = {
        "lr_schedulers": lambda: [schedule_state(config.scheduler) for config in session.schedulers],
        "callbacks": lambda: callback_states(session.callbacks),
        "data": lambda: session.train_data.state_dict() if session.train_data is not None else [],
        "datamodule": lambda: session.datamodule.state_dict() if session.datamodule is not None else {},
    }
    for part, take in parts.items():
        try:
            value = take()
        except EchelonError:
            raise
        except Exception:  # noqa: BLE001 - it may not be ready before training begins: saving it will tell
            continue
        Encoder().encode(value, f"state[{part!r}]", part)


def _check_first_states(session: Session) -> None:
    """Encode what optimizers that have not stepped yet will keep, as far as steps on imitations show it."""
    for index, optimizer in enumerate(session.optimizers):
        if optimizer.state or type(optimizer).__module__.startswith("torch.optim") or needs_closure(optimizer):
            continue
        names = dict(zip(optimizer_parameters(optimizer), parameter_names(optimizer, session.module), strict=True))
        from ...strategies.parallel.optimizer_probe import OptimizerProbe

        for parameter, state in OptimizerProbe(optimizer).first_state():
            Encoder().encode(state, f"state['optimizers'][{index}]['state'][{names[parameter]!r}]", "optimizers")


def _check_stages(session: Session) -> None:
    """Refuse weights that wrap other tensors in a pipeline, whose stages are written by different ranks.

    Raises:
        CheckpointError: naming one.
    """
    for name, parameter in session.module.named_parameters():
        if is_wrapper(parameter):
            raise CheckpointError(
                f"state['model'][{name!r}] is {describe_if_unfit(parameter)}, which no checkpoint of pipeline stages "
                "can hold; use dp_shard or tp instead of pp, or a dense weight."
            )


def _find_fault(parts: dict[str, object]) -> CheckpointError | None:
    try:
        for part, value in parts.items():
            Encoder().encode(value, f"state[{part!r}]", part)
    except CheckpointError as error:
        return error
    return None


def _saves_checkpoints(session: Session, *, weights_only: bool) -> bool:
    savers = [each for each in session.callbacks if isinstance(each, ModelCheckpoint)]
    writes = any(each.save_weights_only is weights_only and (each.save_top_k or each.save_last) for each in savers)
    saves_errors = any(isinstance(each, OnExceptionCheckpoint) for each in session.callbacks)
    return writes or (not weights_only and (saves_errors or session.recovery is not None))


def _has_hooks(session: Session) -> bool:
    hooks = [(each, Callback) for each in session.callbacks]
    return overrides_method(session.module, "on_save_checkpoint", TrainModule) or any(
        overrides_method(owner, "on_save_checkpoint", base) for owner, base in hooks
    )
