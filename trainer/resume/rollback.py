"""Rolling a run back to its last checkpoint, without rereading the data since then."""

from __future__ import annotations

from ...callbacks.dispatch import load_callback_states
from ...callbacks.helpers.loggers import tell_loggers
from ...common.errors import RunError
from ...common.storage import AnyPath
from ..loop.schedule import plan_epoch
from ..session.session import Session
from .find_checkpoint import read_checkpoint
from .run_state import load_weights
from .schedules import load_schedule


def roll_back(session: Session, path: AnyPath) -> None:
    """Restore weights, optimizers, step schedulers, callbacks and step counters from a checkpoint of this run.

    Epoch, data position and random generators stay where they are: the data read since the checkpoint is skipped. So if
    the run is killed now, resumed from that checkpoint, and decides the same again, it continues in the same way.
    Collective: every rank calls it, between two optimizer steps.

    Raises:
        RunError: inside an optimizer step, and outside of training batches.
    """
    if session.progress.is_in_step:
        raise RunError(
            f"roll_back was called inside an optimizer step (micro-batch {session.progress.batch_idx} of epoch "
            f"{session.state.epoch}), whose gradients belong to the weights as they are; call it in on_train_step_end."
        )
    if session.progress.stage != "train":
        raise RunError(f"roll_back was called in stage={session.progress.stage!r}; call it in on_train_step_end.")
    session.writer.close()  # on every rank this returns when the checkpoint is committed
    session.writer.wait_for_copy()
    saved = read_checkpoint(path, session.strategy)
    state, loop = session.state, saved["loop"]
    load_weights(session, saved)
    for optimizer, optimizer_state in zip(session.optimizers, saved["optimizers"], strict=True):
        session.placed.load_optimizer_state(optimizer, optimizer_state)
    for config, scheduler_state in zip(session.schedulers, saved["lr_schedulers"], strict=True):
        if config.interval == "step":
            load_schedule(config.scheduler, scheduler_state)
        elif hasattr(config.scheduler, "get_last_lr"):  # epochs are not rolled back, but the optimizer's rates were
            for group, rate in zip(
                config.scheduler.optimizer.param_groups, config.scheduler.get_last_lr(), strict=True
            ):
                group["lr"] = rate
    if saved["precision"]:
        session.placed.scaling.scaler.load_state_dict(saved["precision"])
    state.global_step, state.optimizer_steps = loop["global_step"], list(loop["optimizer_steps"])
    state.skipped_steps = loop["skipped_steps"]
    session.metrics.restart_stage(
        saved["metrics"] if loop["epoch"] == state.epoch and not loop["is_epoch_done"] else None
    )
    session.metrics.position = state.global_step
    load_callback_states(session.callbacks, saved["callbacks"])
    plan_epoch(session)
    if session.strategy.rank == 0:
        tell_loggers(session.loggers, "resume_at", state.global_step)
