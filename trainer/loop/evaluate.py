"""The evaluation loop: validation, test and prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn

from ...strategies import Strategy
from ..data.sample_checks import compare_first_reads, gather_numbers
from ..data.seed import isolated_rng
from ..metrics.accumulator import to_numbers
from ..metrics.reduction import Line
from ..module.arguments import num_step_arguments
from ..session.progress import Predictions
from ..session.session import Session
from .host_copy import HostCopy
from .idle_rank import leave_no_trace
from .schedule import has_validation, note_validated, reload_if_due

if TYPE_CHECKING:
    from ..data.evaluation_data import EvaluationBatch

EvaluationStage = Literal["sanity_check", "validate", "test", "predict"]

Results = list[dict[str, float]]
"""The logged metrics of each loader."""

_STEP_NAMES: Final[dict[EvaluationStage, str]] = {
    "sanity_check": "validation",
    "validate": "validation",
    "test": "test",
    "predict": "predict",
}


def validate_in_fit(session: Session) -> None:
    """Validate inside `fit`, without affecting the random streams of training."""
    session.writer.wait_for_copy()  # hooks may swap the weights
    _call_own(session.module, "on_validation_model_zero_grad")
    with isolated_rng(session.strategy.devices), session.streams.kept():
        reload_if_due(session, "validate")
        evaluate_stage(session, "validate")
    note_validated(session)


def sanity_check(session: Session) -> None:
    """Run a few validation batches before training, and discard the results: a bug in validation shows at once."""
    limit = session.settings.num_sanity_val_steps
    if limit == 0 or not has_validation(session):
        return
    with session.progress.in_stage("sanity_check"):
        session.hooks.call("on_sanity_check_start")
        with isolated_rng(session.strategy.devices), session.streams.kept():
            evaluate_stage(session, "sanity_check", math.inf if limit == -1 else limit)
        session.metrics.forget()
        session.hooks.call("on_sanity_check_end")


def evaluate_stage(session: Session, stage: EvaluationStage, limit: float = math.inf) -> Results:
    """Run every batch of the evaluation loaders through the stage's step, and reduce the logged values."""
    name = _STEP_NAMES[stage]
    module, hooks, metrics, data = session.module, session.hooks, session.metrics, session.evaluation_data
    assert data is not None
    training_batch_idx = session.progress.batch_idx
    with session.progress.in_stage(stage):
        session.replicas.sync()
        logs_into = metrics.enter("validate" if stage == "sanity_check" else stage)
        metrics.clear_stage()
        may_infer = session.settings.inference_mode and not session.strategy.forward_is_collective
        without_grad = torch.inference_mode() if may_infer else torch.no_grad()
        with _in_eval_mode(module):
            _call_own(module, f"on_{name}_model_eval")
            with without_grad:
                hooks.call(f"on_{name}_start")
                hooks.call(f"on_{name}_epoch_start")
                for dataloader_idx in range(len(data.loaders)):
                    _evaluate_loader(session, name, dataloader_idx, limit)
                if session.predictions is not None:
                    session.predictions = _gather_predictions(session.strategy, session.predictions)
                values = metrics.end_batches()
                hooks.call(f"on_{name}_epoch_end")
                values += metrics.end_hooks()
                if stage not in ("sanity_check", "predict"):
                    session.log({line.reported: value for line, value in values})
                hooks.call(f"on_{name}_end")
        _call_own(module, f"on_{name}_model_train")
        metrics.clear_stage()
        metrics.enter(logs_into)
    session.progress.go_to(training_batch_idx)
    return [_of_loader(values, index) for index in range(len(data.loaders))]


def _call_own(module: nn.Module, name: str) -> None:
    """Call a hook of the module, unless it was set to None."""
    hook = getattr(module, name)
    if hook is not None:
        hook()


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and restore each submodule's mode afterwards, also after an error."""
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
    num_args = num_step_arguments(session.module, f"{name}_step", 3 if several else 2)
    action = f"{name}_step"
    step = session.placed.step_fn(action)
    batches = data.batches(dataloader_idx, limit, session.state.global_step, session.run.current_epoch)
    batches = compare_first_reads(batches, session.strategy, attrgetter("batch"))
    in_lockstep = session.strategy.forward_is_collective and session.strategy.data_size > 1
    run_unseen = partial(_run_unseen, session, action, dataloader_idx, num_args)
    rounds = _in_lockstep(session, batches, action, run_unseen) if in_lockstep else zip(batches, repeat(()))
    copy = HostCopy(None)
    for (batch_idx, batch, indices), busy in rounds:
        metrics.begin_batch(session.count(batch) if indices is None else len(indices))
        session.progress.go_to(batch_idx, indices or [])
        if session.transfer is not None:
            with session.streams:
                batch = session.transfer(batch, dataloader_idx)
        for hook in getattr(hooks, f"on_{name}_batch_start"):
            hook(batch, batch_idx, dataloader_idx)
        lent = batch, batch_idx
        beside_idle = nullcontext() if all(busy) else session.placed.beside_idle(action, busy, lent)
        with session.profiler.profile(action), beside_idle, session.streams, metrics.means:
            output = step(*(batch, batch_idx, dataloader_idx)[:num_args])
        if session.predictions is not None:
            copy.finish()  # the previous batch's copy, which ran alongside this batch
            copy = HostCopy(output)
            kept = copy.output, session.progress.batch_indices
            session.predictions.outputs[dataloader_idx].append((batch_idx, kept))
        for hook in getattr(hooks, f"on_{name}_batch_end"):
            hook(output, batch, batch_idx, dataloader_idx)
        if session.progress.stage != "sanity_check" and (values := metrics.batch_values()):
            session.log_numbers({**to_numbers(values), "step": metrics.batch - 1})
        if session.task != "fit":
            session.profiler.step()
    copy.finish()
    metrics.end_loader()


def _of_loader(values: Sequence[tuple[Line, Tensor]], index: int) -> dict[str, float]:
    """Return the values that were logged for this loader, or for none in particular."""
    return {line.reported: value.item() for line, value in values if line.dataloader_idx in (None, index)}


def _in_lockstep(
    session: Session, batches: Iterator[EvaluationBatch], step_name: str, run: Callable[[object], None]
) -> Iterator[tuple[EvaluationBatch, Sequence[bool]]]:
    """Yield this rank's batches, and which data ranks have one, and stand by while only other ranks have batches.

    Collective: every rank iterates to the end.
    """
    strategy = session.strategy
    while True:
        item = next(batches, None)
        busy = [bool(row[0]) for row in gather_numbers(strategy, [float(item is not None)])]
        if item is not None:
            yield item, busy
        elif any(busy):
            session.placed.stand_by(step_name, busy, run)
        else:
            return


def _run_unseen(session: Session, step_name: str, dataloader_idx: int, num_args: int, lent: tuple[object, int]) -> None:
    """Run a step of another rank's batch, which does not count here."""
    with leave_no_trace(session, step_name):
        session.placed.step_fn(step_name)(*(*lent, dataloader_idx)[:num_args])


def _gather_predictions(strategy: Strategy, own: Predictions) -> Predictions:
    """Return the predictions of all ranks, with their sample indices. Collective: every rank calls it."""
    loaders = in_dataset_order(strategy.ranks.data.all_gather_object(own.outputs))
    return Predictions(
        [[prediction for prediction, _ in loader] for loader in loaders],
        [[indices for _, indices in loader] for loader in loaders],
    )


def in_dataset_order(gathered: Sequence[Sequence[Sequence[tuple[int, object]]]]) -> list[list[Any]]:
    """Return, for each loader, the predictions of all ranks in batch order.

    Args:
        gathered: for each rank and each loader, the pairs of batch index and prediction. Ranks that share a
            model saw the same batch and have the same prediction; one of them is kept.
    """
    merged: list[list[object]] = []
    for parts in zip(*gathered, strict=True):
        by_index = {batch_idx: prediction for part in parts for batch_idx, prediction in part}
        merged.append([by_index[batch_idx] for batch_idx in sorted(by_index)])
    return merged
