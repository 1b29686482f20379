"""TargetMean: the targets that a cross-entropy is the mean over, read from the autograd graph of a loss.

A model that gets labels returns a plain tensor, and the number of its targets is nowhere but in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor
from torch.autograd.graph import Node

from ..torch_internals.autograd import adds_as_it_is, find_notes, is_of_one_element, read_mean_counts

_Kind = Literal["mean", "same", "one", "sum", "factor", "other"]
_KINDS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(("NllLossBackward0", "NllLoss2DBackward0"), "mean"),
    **dict.fromkeys(
        (
            *("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0"),
            *("ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"),
            "_DDPSinkBackward",  # around what a module returns under DDP with a static graph
        ),
        "same",
    ),
    **dict.fromkeys(("SumBackward0", "MeanBackward0"), "one"),
    **dict.fromkeys(("AddBackward0", "SubBackward0"), "sum"),
    **dict.fromkeys(
        ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1", "NegBackward0", "RsubBackward1"), "factor"
    ),
}
"""What an operation does with a loss: computes the mean, keeps its value, reduces one element, adds, multiplies."""
_NOTE: Final = "echelon.target_mean"
_MOST_NODES: Final = 64
"""The operations among which the parts of a loss are looked for."""


@dataclass(frozen=True, slots=True)
class TargetMean:
    """What a cross-entropy was divided by, and the number of all targets, those with the ignored index included."""

    count: Tensor
    """The number of targets that count, or the sum of their classes' weights; a scalar on the loss's device."""
    number: int


def target_mean_of(loss: Tensor) -> TargetMean | None:
    """Return what a loss is the mean over, if it is a mean cross-entropy and nothing else; None otherwise.

    A loss that was multiplied or divided is none: its author may have weighted it, by its targets for example.
    """
    node = loss.grad_fn
    while node is not None:
        kind = _kind_of(type(node).__name__)
        if kind == "mean":
            return _mean_at(node)
        if kind in ("factor", "sum"):
            noted = find_notes(node).get(_NOTE)
            if noted is not None or kind == "factor":
                return noted
        if kind == "other" or (kind == "one" and not is_of_one_element(node)):
            return None
        node = _only_term(node) if kind == "sum" else _only_source(node)
    return None


def note_target_mean(loss: Tensor, mean: TargetMean) -> None:
    """Say what a loss is the mean over, for one that was computed otherwise: as a quotient or a sum."""
    if loss.grad_fn is not None:
        find_notes(loss.grad_fn)[_NOTE] = mean


def target_means_in(loss: Tensor) -> list[TargetMean]:
    """Return the means over targets of which a loss is a sum, with any factors; empty if it has other parts only."""
    return [mean for node in _find_cross_entropies(loss.grad_fn) if (mean := _mean_at(node)) is not None]


def _find_cross_entropies(root: Node | None) -> Iterator[Node]:
    """Yield the cross-entropies among the operations on scalars from which a loss was computed."""
    nodes, seen = [root], 0
    while nodes and seen < _MOST_NODES:
        node, seen = nodes.pop(), seen + 1
        if node is None:
            continue
        kind = _kind_of(type(node).__name__)
        if kind == "mean":
            yield node
        elif kind != "other":
            nodes += [source for source, _ in node.next_functions]


def _kind_of(operation: str) -> _Kind:
    return _KINDS.get(operation, "other")


def _mean_at(node: Node) -> TargetMean | None:
    counts = read_mean_counts(node)
    return None if counts is None else TargetMean(*counts)


def _only_source(node: Node) -> Node | None:
    sources = [source for source, _ in node.next_functions if source is not None]
    return sources[0] if len(sources) == 1 else None


def _only_term(node: Node) -> Node | None:
    """Return what a constant was added to; the cross-entropy of one with label smoothing, which torch makes a sum."""
    (first, _), (second, _) = node.next_functions
    if second is None:
        return first
    if first is None:
        return second if adds_as_it_is(node) else None
    # aten multiplies by C++ scalars, which a program in Python cannot do
    if type(first).__name__ != "MulBackward1" or type(second).__name__ != "MulBackward1":
        return None
    mean, spread = _only_source(first), _only_source(second)
    is_smoothed = _kind_of(type(mean).__name__) == "mean" and type(spread).__name__ == "DivBackward0"
    return mean if is_smoothed else None
