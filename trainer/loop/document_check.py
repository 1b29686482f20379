"""The check, on the first batch of a run, that documents which share a sequence do not see each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..data.micro_batch import Window
from ..module.arguments import num_step_arguments
from ..module.loss import loss_of, mean_of
from ..session.session import Session
from .idle_rank import leave_no_trace

_TOLERANCE: Final = 1e-6
"""Tokens that are masked have a weight of exactly 0, in every dtype."""


def check_documents(session: Session, window: Window) -> None:
    """Warn if the loss of a packed document changes with the tokens of others in its sequence, as `PackedDataset` says.

    Rank 0 tries the step twice, without a trace; not where the forward is collective, nor in manual optimization.
    """
    strategy, module = session.strategy, session.module
    is_alone = not strategy.forward_is_collective and session.placed.ranks.stage.world_size == 1
    if not (window and is_alone and module.automatic_optimization and not strategy.rank):
        return
    batch = window[0].batch
    alone = _with_last_document(batch)
    if alone is None:
        return
    tokens, others = alone["input_ids"], alone["document_ids"] != _last_document(alone["document_ids"])
    changed = {**alone, "input_ids": torch.where(others, tokens.flip(1), tokens)}
    before, after = _compute_loss(session, alone), _compute_loss(session, changed)
    if not math.isfinite(before) or abs(before - after) <= _TOLERANCE * abs(before):
        return
    warnings.warn(
        f"Documents that share a sequence see each other in {type(module).__name__}: with other tokens in the ones "
        f"before, the loss of the last document changes from {before:.6g} to {after:.6g}. Mask attention with "
        "echelon.document_mask(batch['document_ids']); a model of transformers tells documents apart by position_ids "
        "if it gets no attention_mask and has no cache (use_cache=False). A term over all tokens, such as that of a "
        "router, changes the loss as well.",
        stacklevel=2,
    )


def _with_last_document(batch: object) -> dict[str, Any] | None:
    """Return a packed batch with labels for the last document of each sequence only; None if it is not packed."""
    names = ("input_ids", "labels", "document_ids")
    if not (isinstance(batch, Mapping) and all(isinstance(batch.get(name), Tensor) for name in names)):
        return None
    documents, labels = batch["document_ids"], batch["labels"]
    if documents.ndim != 2 or not documents.shape == labels.shape == batch["input_ids"].shape:
        return None
    from ..sequences.packed_dataset import IGNORED

    last = _last_document(documents)
    kept = torch.where((documents == last) & (last > 0), labels, IGNORED)
    if not (kept != IGNORED).any():
        return None
    return {**batch, "labels": kept, "shift_labels": kept.roll(-1, 1)}  # the first token is no target


def _last_document(documents: Tensor) -> Tensor:
    return documents.max(dim=1, keepdim=True).values


def _compute_loss(session: Session, batch: object) -> float:
    module = session.module
    with leave_no_trace(session, "training_step"):
        if session.transfer is not None:
            batch = session.transfer(batch, 0)
        with session.placed.precision.forward_context(session.strategy.device):
            output = module.training_step(*(batch, 0)[: num_step_arguments(module, "training_step", 2)])
        loss = loss_of(output, module=module)
        return math.nan if loss is None else mean_of(loss).item()
