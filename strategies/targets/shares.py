"""Shares of ranks in means over tokens: noted at a loss, and in the weight of a logged value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ...common.errors import ModuleError
from ..torch_internals.autograd import find_notes

_NOTE: Final = "echelon.share"


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The weight of a logged value that is a mean over this rank's part of a batch, in place of a ``batch_size``."""

    share: float
    """This rank's part, in equal shares of the ranks that have one."""
    batch_size: float | None
    """The weight of the whole; None for the samples of the batch."""

    def of(self, size: float) -> float:
        """Return the weight of the part, of a batch with this many samples."""
        return self.share * (size if self.batch_size is None else self.batch_size)


def note_share(loss: Tensor, share: float | None) -> None:
    """Say of which share of the tokens a loss is, in equal shares of ranks; None if the loss alone does not tell."""
    if loss.grad_fn is not None:
        find_notes(loss.grad_fn)[_NOTE] = share


def share_of(loss: Tensor) -> float | None:
    """Return what `note_share` has said of a loss; 1.0 for any other."""
    return 1.0 if loss.grad_fn is None else find_notes(loss.grad_fn).get(_NOTE, 1.0)


def unclear_share(what: str, remedy: str) -> ModuleError:
    """Return the error for a mean over the tokens of one of several sequences, of which ranks have other shares."""
    return ModuleError(
        f"{what} is a mean over tokens, but the batch has sequences of several lengths, of which the ranks under "
        f"context parallelism have different shares; {remedy}."
    )
