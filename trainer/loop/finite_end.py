"""The check, once when a fit ends, that its weights are finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ...callbacks.model_checkpoint import ModelCheckpoint
from ...common.errors import CheckpointError
from ...common.storage import AnyPath
from ...strategies.state.dtensor import local_shard, values_here
from ...strategies.torch_internals.fake_tensors import is_without_memory
from ...strategies.torch_internals.tensors import is_traceable_wrapper_subclass
from ..checkpoint import list_checkpoints, load
from ..session.not_finite import REMEDY
from ..session.session import Session

_MOST_READ: Final = 10
"""Checkpoints to read, from the newest one on."""


def warn_if_not_finite(session: Session) -> None:
    """Warn that a fit ends with weights that are NaN or infinite, and which checkpoint is still finite.

    Collective: every rank calls it.
    """
    strategy = session.strategy
    own = next(
        _not_finite((n, values_here(p.detach())) for n, p in _trained_parameters(session) if not _is_elsewhere(p)), ""
    )
    if strategy.ranks.all.all_reduce(float(bool(own)), "max"):
        names: list[str] = strategy.ranks.all.all_gather_object(own)
        if strategy.rank == 0:
            _warn_not_finite(session, next(filter(None, names)))


def _trained_parameters(session: Session) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that training changes; a mask among the others may be infinite on purpose."""
    named = session.module.named_parameters()
    return ((name, p) for name, p in named if p.requires_grad and not is_lazy(p))


def _is_elsewhere(parameter: Tensor) -> bool:
    """Return whether this process has no values of a parameter: others have, or nobody while a run is planned."""
    is_elsewhere = parameter.is_meta or (parameter.numel() > 1 and not any(parameter.stride()))
    return is_elsewhere or is_without_memory(local_shard(parameter))


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors that hold a NaN or infinity; those of whole or packed numbers hold none."""
    for name, tensor in named:
        is_plain = tensor.dtype.itemsize > 1 and not is_traceable_wrapper_subclass(tensor)
        has_fractions = is_plain and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
        if has_fractions and not math.isfinite(torch.linalg.vector_norm(tensor, ord=math.inf).item()):
            yield name


def _warn_not_finite(session: Session, name: str) -> None:
    since = f" It was first seen {session.not_finite.found}." if session.not_finite.found else ""
    kept = _newest_finite(session)
    resume = f" The newest checkpoint with finite weights is {str(kept)!r}." if kept is not None else ""
    warnings.warn(
        f"The fit ends at global_step {session.state.global_step} with weights that are not finite, such as {name!r}."
        f"{since}{resume} Lower the learning rate or clip gradients (gradient_clip_val), and {REMEDY}",
        stacklevel=2,
    )


def _newest_finite(session: Session) -> AnyPath | None:
    """Return the newest checkpoint of this run whose weights are finite, if one of the newest is."""
    folders = {each.dirpath for each in session.callbacks if isinstance(each, ModelCheckpoint) and each.dirpath}
    names = {name for name, _ in _trained_parameters(session)}
    try:
        for found in list(reversed(list_checkpoints(*sorted(folders))))[:_MOST_READ]:
            if found.manifest is None or found.manifest.lineage != session.origin.lineage:
                continue
            weights = load(found.path, parts=("model",), verify=False)["model"]
            if next(_not_finite((n, w) for n, w in weights.items() if n in names), None) is None:
                return found.path
    except CheckpointError:  # it is only a hint
        pass
    return None
