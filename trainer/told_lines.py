"""Lines that a fit prints on rank 0: from where it starts, and where its results are."""

from __future__ import annotations

from torch import nn

from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.omit_frozen_weights import OmitFrozenWeights
from ..callbacks.progress_display import tell_beside_bar
from ..common.lazy_names import is_imported
from ..common.storage import Pending
from ..common.units import in_units
from ..strategies.state.dtensor import local_shard
from ..strategies.wrapped.wrapped_tensors import held_tensors
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
    tell_line(session, f"Training on {device}{num_processes}{origin}.")


def tell_frozen_base(session: Session) -> None:
    """Tell how much of the base of a model with adapters of peft checkpoints leave out, or how they would.

    By default they leave out what `load_pretrained` has read from files. The rest they keep: a resumed run needs a base
    that is the same bit by bit, and a module that draws rows for added tokens, say, would build another one.
    """
    if not is_imported("peft"):
        return
    from ..strategies.pretrained.adapters import is_adapted

    savers = [one for one in session.callbacks if isinstance(one, ModelCheckpoint)]
    omission = next((one for one in session.callbacks if isinstance(one, OmitFrozenWeights)), None)
    is_chosen = any(one.frozen for one in savers) or (omission is not None and omission.names is None)
    model = next((part for part in session.module.modules() if is_adapted(part)), None)
    if is_chosen or model is None or not savers:
        return
    if omission is not None and omission.names is not None:
        named = session.module.named_parameters()
        size = sum(_bytes_of(one) for name, one in named if name in omission.names and not one.requires_grad)
        line = (
            f"Checkpoints leave out {in_units(size)} of frozen weights, which load_pretrained has read and reads "
            "again; ModelCheckpoint(frozen='keep') keeps them."
        )
    else:
        sizes = {parameter: _bytes_of(parameter) for parameter in model.parameters()}
        size = sum(sizes[parameter] for parameter in sizes if not parameter.requires_grad)
        if size <= sum(sizes.values()) / 2:
            return
        line = (
            f"Each checkpoint holds {in_units(size)} of frozen weights beside the adapters; if the module always "
            "builds the same base, as from a folder, ModelCheckpoint(frozen='omit') leaves them out."
        )
    tell_line(session, line)


def _bytes_of(parameter: nn.Parameter) -> int:
    """Return the bytes of a whole parameter, as it is kept: a quantized one has fewer than its dtype says."""
    shard = local_shard(parameter)
    held = sum(inner.nbytes for inner in held_tensors(shard))
    return round(held * parameter.numel() / shard.numel()) if shard.numel() else parameter.nbytes


def tell_upload(session: Session, upload: Pending) -> None:
    """Tell that training is over, and what of its last checkpoint the fit still waits for."""
    tell_line(session, f"Waiting until {in_units(upload.left)} of {in_units(upload.size)} are sent to {upload.path}.")


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
    tell_line(session, "; ".join(parts))


def tell_line(session: Session, line: str) -> None:
    """Print a line beside the progress bar; without a bar, only log it."""
    if not session.run.is_global_zero or session.strategy.ranks.all.is_fake:
        return
    tell_beside_bar(session.callbacks, line)
