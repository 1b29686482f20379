"""The training loop and the evaluation loop, in the order in which things happen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Final

import torch
from torch import nn

from ...strategies.distributed.nested import map_tensors
from ...strategies.errors import DataError
from ..data.seed import isolated_rng
from ..data.transfer import check_batch, size_of
from ..data.window import Window
from ..session.session import EvaluationStage, Session
from .lockstep import in_lockstep
from .predictions import in_dataset_order
from .step import step_schedulers, take_steps

Results = list[dict[str, float]]
"""For each loader what was logged on it."""

_STEP_NAMES: Final[dict[EvaluationStage, str]] = {
    "sanity_check": "validation",
    "validate": "validation",
    "test": "test",
    "predict": "predict",
}


def train(session: Session) -> None:
    """Train until an end: of epochs, steps or time, or because a hook or a signal asked for it.

    At every step boundary, in this order: update, step metrics, validation if due; at the end of an epoch its metrics,
    hooks and schedulers; then, with nothing left undone, `on_train_step_end`, where checkpoints are saved.
    """
    state, hooks, writer, interruption = session.state, session.hooks, session.writer, session.interruption
    step_hooks, is_alone = hooks.on_train_step_end, not session.meetings.is_needed
    hooks.call("on_train_start")
    while not session.is_over():
        _begin_epoch(session)
        is_partial = False
        has_plateaus = any(config.reduce_on_plateau for config in session.schedulers)
        is_profiled, may_run_out = session.profiler.is_active, interruption.has_limit
        for num_micro_batches in take_steps(session, _windows(session)):
            step = state.global_step
            if step >= session.next_log:
                _log_step(session)
            if session.validates_inside and session.is_validation_due(num_micro_batches):
                validate(session)
            if has_plateaus:
                step_schedulers(session, "step", step, with_metric=True)
            if is_profiled:
                session.profiler.step()
            if num_micro_batches == 0 or state.batches_in_epoch >= session.num_batches:
                break
            if writer.has_failed and is_alone:
                writer.raise_if_failed()
            for hook in step_hooks:
                hook()
            may_be_over = is_alone and (session.should_stop or interruption.signal is not None or may_run_out)
            if (may_be_over or step >= session.next_check) and session.is_over():
                is_partial = True
                hooks.call("on_train_last_step")
                break
        _end_epoch(session, is_partial)
        if not is_partial:
            hooks.call("on_train_step_end")
            if session.is_over():
                hooks.call("on_train_last_step")
    writer.wait_for_copy()
    session.strategy.sync_replicas()  # under torchrun each rank keeps its own replica
    hooks.call("on_train_end")


def _begin_epoch(session: Session) -> None:
    """Go to the next epoch, or on with one that was resumed."""
    state, metrics = session.state, session.metrics
    session.writer.wait_for_copy()
    is_new = state.is_epoch_done or state.batches_in_epoch == 0
    state.begin_epoch()
    session.batch_idx = state.batches_in_epoch
    metrics.enter("train")
    if is_new:
        metrics.clear_stage()
        session.reload_if_due()
    session.hooks.call("on_train_epoch_start")
    data = session.train_data
    assert data is not None
    data.recut(session.accumulate_grad_batches)
    state.global_batch_size = data.global_batch_size
    session.plan_epoch()
    if is_new:
        data.begin_epoch(state.epoch)


def _windows(session: Session) -> Iterator[Window]:
    """Return the micro-batches of each step of the rest of the epoch; the first of a run is checked.

    Raises:
        DataError: when a whole epoch is empty, or the first batch holds no tensor.
    """
    data, state = session.train_data, session.state
    assert data is not None
    windows = data.windows(state.batches_in_epoch)
    if state.batches_in_epoch == 0:
        first = next(windows, None)
        if first is None:
            raise DataError(
                f"The training loader gave no batch in epoch {state.epoch}; if it can be read only once, set "
                "max_epochs=1, "
                "or pass one that begins anew with each iter()."
            )
        if state.global_step == 0 and first:  # this rank may have no part in the first step
            check_batch(first[0][0], "training", session.moves_own_types)
        windows = chain([first], windows)
    return iter(session.profiler.measured("fetch", windows.__next__), None) if session.profiler.is_active else windows


def _log_step(session: Session) -> None:
    session.log(session.metrics.step_values())
    session.next_log += session.settings.log_every_n_steps


def _end_epoch(session: Session, is_partial: bool) -> None:
    """Do everything due at the end of an epoch; of one that is cut short, only what reports."""
    state, metrics = session.state, session.metrics
    if not is_partial and session.is_validation_due_at_epoch_end():
        validate(session)
    session.hooks.call("on_train_epoch_end")
    values = metrics.end_stage()
    if not (is_partial and session.run.is_interrupted):  # the run that goes on will log the epoch as a whole
        session.log(values)
    if is_partial:
        return
    step_schedulers(session, "epoch", state.epoch + 1)
    step_schedulers(session, "epoch", state.epoch + 1, with_metric=True)
    state.is_epoch_done = True


def validate(session: Session) -> None:
    """Validate inside `fit`; the random streams of training do not notice."""
    session.writer.wait_for_copy()  # hooks may swap the weights
    session.module.on_validation_model_zero_grad()
    with isolated_rng():
        evaluate(session, "validate")
    session.validated_at = session.state.global_step


def sanity_check(session: Session) -> None:
    """Run a few validation batches before training, and forget them: a bug in validation shows at once."""
    limit = session.settings.num_sanity_val_steps
    if limit == 0 or not session.validates:
        return
    session.hooks.call("on_sanity_check_start")
    with isolated_rng():
        evaluate(session, "sanity_check", math.inf if limit == -1 else limit)
    session.metrics.forget()
    session.hooks.call("on_sanity_check_end")


def evaluate(session: Session, stage: EvaluationStage, limit: float = math.inf) -> Results:
    """Run every batch of the evaluation loaders through the stage's step, and reduce what was logged."""
    name = _STEP_NAMES[stage]
    module, hooks, metrics, data = session.module, session.hooks, session.metrics, session.evaluation_data
    assert data is not None
    outer, training_batch_idx = session.stage, session.batch_idx
    session.stage = stage
    session.strategy.sync_replicas()
    logs_into = metrics.enter("validate" if stage == "sanity_check" else stage)
    metrics.clear_stage()
    may_infer = session.settings.inference_mode and session.strategy.supports_inference_mode
    without_grad = torch.inference_mode() if may_infer else torch.no_grad()
    with _in_eval_mode(module):
        getattr(module, f"on_{name}_model_eval")()
        with without_grad:
            hooks.call(f"on_{name}_start")
            hooks.call(f"on_{name}_epoch_start")
            for dataloader_idx in range(len(data.loaders)):
                _evaluate_loader(session, name, dataloader_idx, limit)
            if session.predictions is not None:
                session.predictions = in_dataset_order(session.strategy.all_gather_object(session.predictions))
            hooks.call(f"on_{name}_epoch_end")
            values = metrics.end_stage()
            if stage not in ("sanity_check", "predict"):
                session.log(values)
            hooks.call(f"on_{name}_end")
    getattr(module, f"on_{name}_model_train")()
    metrics.clear_stage()
    metrics.enter(logs_into)
    session.stage, session.batch_idx = outer, training_batch_idx
    numbers = {key: value.item() for key, value in values.items()}
    return [_of_loader(numbers, index) for index in range(len(data.loaders))]


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and each part back to its own, also after an error."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _evaluate_loader(session: Session, name: str, dataloader_idx: int, limit: float) -> None:
    """Run the batches of one loader through a step."""
    hooks, metrics, data = session.hooks, session.metrics, session.evaluation_data
    assert data is not None
    several = len(data.loaders) > 1
    metrics.dataloader_idx = dataloader_idx if several else None
    num_args = session.num_step_args(f"{name}_step", 3 if several else 2)
    action = f"{name}_step"
    is_first = True
    batches = data.batches(dataloader_idx, limit, session.state.global_step)
    if session.strategy.forward_is_collective and session.is_shared:
        batches = in_lockstep(session, batches, action, dataloader_idx, num_args)
    for batch_idx, batch in batches:
        if is_first:
            check_batch(batch, name, session.moves_own_types)
            is_first = False
        metrics.in_batch, metrics.batch_size = True, size_of(batch)
        session.batch_idx = batch_idx
        if session.transfer is not None:
            batch = session.transfer(batch, dataloader_idx)
        for hook in getattr(hooks, f"on_{name}_batch_start"):
            hook(batch, batch_idx, dataloader_idx)
        with session.profiler.record(action):
            output = session.strategy.run(action, *(batch, batch_idx, dataloader_idx)[:num_args])
        if session.predictions is not None:
            session.predictions[dataloader_idx].append((batch_idx, map_tensors(torch.Tensor.cpu, output)))
        for hook in getattr(hooks, f"on_{name}_batch_end"):
            hook(output, batch, batch_idx, dataloader_idx)
        if session.task != "fit":
            session.profiler.step()
    metrics.in_batch, metrics.dataloader_idx = False, None


def _of_loader(numbers: dict[str, float], index: int) -> dict[str, float]:
    """Return what was logged on one loader, or on no particular one."""
    mine = f"/dataloader_idx_{index}"
    return {key: number for key, number in numbers.items() if "/dataloader_idx_" not in key or key.endswith(mine)}
