"""The work of a fit, validate, test or predict in one process, inside an open session."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from ..callbacks.prediction_writer import BasePredictionWriter
from ..strategies.module.activation_checkpointing import ActivationCheckpointing, checkpointing_activations
from ..strategies.state.omitted_weights import note_trained
from .advice import advise_precision
from .checkpoint.manifest import read_manifest
from .first_look import look_at
from .loop.eval_mode import left_in_eval_mode
from .loop.evaluate import Results, evaluate_stage, sanity_check
from .loop.finite_end import warn_if_not_finite
from .loop.schedule import is_over, start_clock, validates_in_this_epoch
from .loop.step import Step
from .loop.train import train
from .request import Request
from .resume.find_checkpoint import read_checkpoint
from .resume.run_state import first_step_of, load_generators, load_position, load_training, load_weights
from .resume.savable import check_savable
from .session.progress import LoaderKind, Predictions
from .session.session import Session
from .setup import (
    build_optimizers,
    check_interval,
    load_evaluation_data,
    load_train_data,
    log_hparams_and_graph,
    set_up_module,
    warn_if_endless,
    warn_of_late_parameters,
)
from .told_lines import tell_end, tell_frozen_base, tell_start, tell_upload

_log = logging.getLogger(__name__)

_SILENT: Final = 2.0
"""Seconds for which a fit waits for its last checkpoint without a word."""


def fit(session: Session, request: Request) -> None:
    """Train, from the beginning or from a checkpoint. Collective: every rank calls it."""
    saved = _read_saved(session, request)
    if saved is not None:
        load_position(session, saved)  # the order of the samples depends on the seed
        assert session.resumed_from is not None
        manifest = session.strategy.ranks.all.on_first_rank(partial(read_manifest, session.resumed_from))
        session.origin = session.origin.going_on_from(manifest)
    session.reload = partial(_load_data, session, request)
    _load_data(session, request, "train", is_resumed=saved is not None)
    checks = saved is None and session.settings.num_sanity_val_steps != 0 and session.settings.limit_val_batches != 0
    with session.progress.in_stage("sanity_check") if checks else nullcontext():  # what they are for, as in Lightning
        _load_data(session, request, "validate", is_resumed=saved is not None)
    warn_if_endless(session)
    setting = ActivationCheckpointing.of(session.settings.activation_checkpointing)
    with checkpointing_activations(session.module, setting):
        set_up_module(session)
        build_optimizers(session)
        from .steps.make_step import make_step

        step = make_step(session)
        if saved is not None:
            load_weights(session, saved)
            load_training(session, saved, "saved" if session.is_restarted else request.optimizer_settings)
            if not session.is_restarted:  # otherwise it may be a snapshot, which the next one replaces
                session.saves.note(session.resumed_from)
        session.is_built = True
        note_trained(session.module, session.optimizers)
        # a run that asked for its last checkpoint, but was killed before there was one, starts its curves again
        asks_to_resume = request.ckpt_path is not None or session.is_restarted
        session.strategy.ranks.all.on_first_rank(partial(log_hparams_and_graph, session, is_resumed=asks_to_resume))
        session.streams.part(session.strategy, session.state.seed)
        if session.strategy.rank == 0:
            advise_precision(session.strategy.device, session.strategy.precision)
        if session.state.is_between_epochs:
            session.metrics.clear_stage()  # what is logged from here on belongs to the first epoch
        look_at(session, is_resumed=saved is not None)
        tell_start(session, request)
        tell_frozen_base(session)
        known = set(session.module.parameters())
        left_in_eval = left_in_eval_mode(session.module)
        session.hooks.call("on_fit_start")
        warn_of_late_parameters(session, known)
        with session.interruption.listening(lambda: session.saves.last):
            if saved is None:
                sanity_check(session)
            else:
                load_generators(session, saved)
            is_resumed, saved = saved is not None, None  # closes its files
            with session.progress.in_stage("train"), first_step_of(session.state) if is_resumed else nullcontext():
                _train_unless_over(session, step, left_in_eval)
            note_trained(session.module, session.optimizers)  # some may be unfrozen by now
            _finish_saves(session)
        warn_if_not_finite(session)
        session.hooks.call("on_fit_end")
        tell_end(session)


def _train_unless_over(session: Session, step: Step, left_in_eval: Sequence[str]) -> None:
    """Train, if anything is left to train; in a run that goes on, only end training otherwise.

    A kill may have come between the last checkpoint and what the end of training does, such as an export of the model.
    """
    state, settings, resumed_from = session.state, session.settings, session.resumed_from
    assert session.train_data is not None
    start_clock(session)
    is_left = _has_training_left(session)
    if not is_left and resumed_from is not None and not session.is_restarted and session.strategy.rank == 0:
        _log.warning(
            "Nothing is left to train: %s is at epoch %d and global_step %d, with max_epochs=%s and max_steps=%s; "
            "raise them, or the limit that it was trained to, to continue.",
            *(resumed_from, state.current_epoch, state.global_step, settings.last_epoch, settings.max_steps),
        )
    was_trained = resumed_from is not None and state.global_step > 0 and session.train_data.num_batches > 0
    if is_left or (was_trained and not session.run.is_interrupted):
        check_savable(session)
        train(session, step, left_in_eval=left_in_eval, after_first=partial(check_savable, session))


def _finish_saves(session: Session) -> None:
    """Wait until all checkpoints are committed; a signal that comes meanwhile does not cut them off. Collective."""
    if not session.writer.is_done_within(_SILENT) and session.writer.upload is not None:
        tell_upload(session, session.writer.upload)
    session.writer.close()
    interruption = session.interruption
    if session.meetings.is_needed and not interruption.is_requested:
        received = [float(interruption.received or 0)]
        (number,) = session.strategy.ranks.all.begin_all_reduce(received, "max")()
        interruption.signal = int(number) or None


def run_evaluation(session: Session, request: Request) -> Results:
    """Validate, test or predict. Collective: every rank calls it."""
    load_evaluation_data(session, request.task, request.evaluation_loaders)
    assert session.evaluation_data is not None
    set_up_module(session)
    saved = _read_saved(session, request)
    if saved is not None:
        load_weights(session, saved)
    session.is_built = True
    writes = any(isinstance(each, BasePredictionWriter) and each.writes_epoch for each in session.callbacks)
    if request.keeps_predictions or (writes and request.task == "predict"):
        session.predictions = Predictions([[] for _ in session.evaluation_data.loaders])
    stage: Any = request.task
    results = evaluate_stage(session, stage)
    if not request.keeps_predictions:
        session.predictions = None
    return results


def _has_training_left(session: Session) -> bool:
    """Return whether there is anything to train (not with ``max_epochs=0``, say). Collective: every rank calls it."""
    assert session.train_data is not None
    return session.train_data.num_batches > 0 and not is_over(session)


def _read_saved(session: Session, request: Request) -> dict[str, object] | None:
    """Return the contents of the checkpoint, if there is one."""
    if session.resumed_from is None:
        return None
    # the last checkpoint was verified when it was looked up
    verify = request.ckpt_path != "last" and not session.is_restarted
    return read_checkpoint(session.resumed_from, session.strategy, verify=verify)


def _load_data(session: Session, request: Request, kind: LoaderKind, *, is_resumed: bool = False) -> None:
    """Ask the user's hooks for loaders; in a resumed run, for those that it had, in the epoch that it asked in."""
    state, every = session.state, session.settings.reload_dataloaders_every_n_epochs
    epoch, loaded_in = state.epoch + state.is_epoch_done, state.loaded_in.get(kind)
    if is_resumed and every and kind == "train" and loaded_in is None:  # saved without it
        loaded_in = state.loaded_in[kind] = epoch // every * every
    # loaders that are due are asked for in training, but those of an epoch that begins now may be taken at once
    is_due = every > 0 and kind == "train" and loaded_in is not None and epoch - loaded_in >= every
    if is_resumed and loaded_in is not None and not is_due:
        with state.as_in_epoch(loaded_in) if every else nullcontext():
            _load_loaders(session, request, kind)
        return
    _load_loaders(session, request, kind)
    # as in Lightning, loaders used only for the sanity check are requested again at the first validation
    if kind == "train" or validates_in_this_epoch(session):
        state.loaded_in[kind] = epoch


def _load_loaders(session: Session, request: Request, kind: LoaderKind) -> None:
    state = session.state
    if kind == "train":
        load_train_data(session, request.train_loaders)
        assert session.train_data is not None
        per_epoch = session.train_data.num_steps
        if not state.loaded_in and math.isfinite(per_epoch):
            state.steps_per_epoch = int(per_epoch)
    else:
        load_evaluation_data(session, kind, request.evaluation_loaders)
    check_interval(session)
