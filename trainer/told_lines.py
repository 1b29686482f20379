"""Lines that a fit prints on rank 0: from where it starts, and where its results are."""

from __future__ import annotations

from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.omit_frozen_weights import OmitFrozenWeights
from ..callbacks.progress_display import tell_beside_bar
from ..common.storage import Pending
from ..common.units import in_units
from ..strategies.pretrained.adapters import is_adapted
from .request import Request
from .session.session import Session


def tell_start(session: Session, request: Request) -> None:
    """Tell on which device it trains, and from which checkpoint, if any."""
    strategy, found = session.strategy, session.resumed_from
    num_processes = f" in {strategy.world_size} processes" if strategy.world_size > 1 else ""
    if found is not None:
        origin = f", resumed from {found} at step {session.state.global_step}"
    elif request.ckpt_path is not None:
        origin = f" from the beginning: no checkpoint found for ckpt_path={str(request.ckpt_path)!r}"
    else:
        origin = ""
    device = strategy.device.type if num_processes else strategy.device
    tell(session, f"Training on {device}{num_processes}{origin}.")


def tell_frozen_base(session: Session) -> None:
    """Tell how checkpoints of a model with adapters of peft leave its base out, if they do not.

    They keep it by default: a resumed run needs a base that is the same bit by bit, and a module that draws rows for
    added tokens, say, would build another one.
    """
    kinds = {type(callback) for callback in session.callbacks}
    if ModelCheckpoint not in kinds or OmitFrozenWeights in kinds:
        return
    model = next((part for part in session.module.modules() if is_adapted(part)), None)
    if model is None:
        return
    size = {p: p.numel() * p.element_size() for p in model.parameters()}
    frozen = sum(size[p] for p in size if not p.requires_grad)
    if frozen > sum(size.values()) / 2:
        tell(
            session,
            f"Each checkpoint holds {in_units(frozen)} of frozen weights beside the adapters; if the module always "
            "builds the same base, as from a folder, callbacks=OmitFrozenWeights() leaves them out.",
        )


def tell_upload(session: Session, upload: Pending) -> None:
    """Tell that training is over, and what of its last checkpoint the fit still waits for."""
    tell(session, f"Waiting until {in_units(upload.left)} of {in_units(upload.size)} are sent to {upload.path}.")


def tell_end(session: Session) -> None:
    """Tell the step that was reached, what ended training early, the folder of the logs, and the best checkpoint."""
    savers = [one for one in session.callbacks if isinstance(one, ModelCheckpoint)]
    saver = next((one for one in savers if one.best_model_path), None)
    parts = [f"Trained to step {session.state.global_step}"]
    stoppers = [one for one in session.callbacks if isinstance(one, EarlyStopping)]
    reason = next((one.stopping_reason_message for one in stoppers if one.stopping_reason_message), None)
    if reason is not None:
        parts.append(reason[0].lower() + reason[1:].rstrip("."))
    if session.loggers:
        parts.append(f"logs: {session.run.log_dir}")
    if saver is not None:
        score = saver.best_model_score
        rank = "" if score is None or saver.monitor is None else f" ({saver.monitor}={score:.4g})"
        parts.append(f"{'best' if saver.monitor else 'last'} checkpoint: {saver.best_model_path}{rank}")
        now = session.metrics.callback_metrics().get(saver.monitor or "")
        if score is not None and now is not None and float(now) != float(score):
            parts.append(
                f"the module has the weights of the last step ({float(now):.4g}): ckpt_path='best' tests the best"
            )
    tell(session, "; ".join(parts))


def tell(session: Session, line: str) -> None:
    """Print a line beside the progress bar; without a bar, only log it."""
    if not session.run.is_global_zero or session.strategy.ranks.all.is_rehearsed:
        return
    tell_beside_bar(session.callbacks, line)
