"""InnerBackwards: derivatives that a step computes before its backward, which may go through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..torch_internals.autograd import is_in_backward
from ..torch_internals.sharded_units import TreeOfUnits


class InnerBackwards:
    """Keeps the units gathered that a derivative inside of a step has needed, until the backward of the step has ended.

    ``fully_shard`` takes every backward for that of the step: it frees the parameters of a unit once the backward has
    passed it, and reduces its gradients. But a derivative of which the loss is made (a gradient penalty, forces, a
    Hessian-vector product) refers to the parameters in a second backward, which adds to their gradients at any time.
    So these gradients are reduced when that backward has ended.

    Args:
        roots: the ``fully_shard`` roots of a module.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.is_in_step = False
        """Whether a step runs whose backward has not begun."""
        self._roots = list(roots)
        self._trees: list[_Tree] = []

    def begin(self) -> None:
        """Watch the backwards through the units, from the first run on."""
        if not self._trees:
            self._trees = [_Tree(self, TreeOfUnits(root)) for root in self._roots]

    @property
    def has_any(self) -> bool:
        """Whether units are kept for a backward to come."""
        return any(tree.keeps for tree in self._trees)

    def end(self) -> None:
        """Reduce the gradients of a backward that has passed no unit's outputs. Collective if units are kept."""
        for tree in self._trees:
            if tree.keeps:
                tree.end()

    def forget(self) -> None:
        """Let all units be freed."""
        for tree in self._trees:
            tree.keeps = False


class _Tree:
    """The units below one root."""

    def __init__(self, inner: InnerBackwards, units: TreeOfUnits) -> None:
        self.keeps = False
        """Whether units are not freed."""
        self._inner, self._units = inner, units
        self._is_inner = self._is_ending = False
        self._finalize: Callable[[], None] = units.finalize
        units.intercept(self._pre_backward, self._post_backward, self._reshard, self._end_backward)

    def _look(self) -> None:
        """Note which backward this is: in one that is differentiated again, operations are recorded."""
        self._is_inner = self._inner.is_in_step or torch.is_grad_enabled()
        self.keeps |= self._is_inner

    def _pre_backward(self, pre_backward: Callable[..., None], *args: object) -> None:
        self._look()
        pre_backward(*args)

    def _post_backward(self, post_backward: Callable[..., None], *args: object) -> None:
        if not self._is_ending and is_in_backward():
            self._look()
        if self._is_ending or not self.keeps:
            post_backward(*args)

    def _reshard(self, reshard: Callable[[], None]) -> None:
        if self._is_ending or not self.keeps:
            reshard()

    def _end_backward(self, finalize: Callable[[], None]) -> None:
        if self.keeps and self._is_inner:
            self._units.forget_backward()
        else:
            self._end(finalize)

    def end(self) -> None:
        """Reduce the gradients, and free the units. Collective."""
        self._end(self._finalize)

    def _end(self, finalize: Callable[[], None]) -> None:
        self._is_ending = True
        try:
            finalize()
        finally:
            self._is_ending = self.keeps = False
