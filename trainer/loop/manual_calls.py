"""ManualCalls: what a module calls in manual optimization, and an error if it computes gradients in another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from ...common.errors import ModuleError
from ...strategies.state.dtensor import is_dtensor
from ..session.session import Session

_INSIDE: Final = "_in_manual_backward"
"""Marks a module whose ``manual_backward`` runs, for whatever watches its parameters: steps may be tried in a fit."""


class ManualCalls:
    """Checks that gradients come from ``manual_backward`` where others would be wrong.

    ``loss.backward()`` averages over no ranks, does not weigh the loss by the samples of its rank, and does not scale
    it. Until an optimizer has stepped once, each of its gradients is watched; later, `ReplicaGuard` finds what differs
    between ranks. Gradients that a step assigns itself, from ``torch.autograd.grad``, are its own affair.

    Args:
        session: the fit, with its optimizers.
    """

    def __init__(self, session: Session) -> None:
        self._is_needed = False
        if session.module.automatic_optimization:
            return
        self._scales = session.strategy.precision.uses_scaler
        self._is_needed = session.placed.ranks.count.world_size > 1 or self._scales
        self._marks = vars(session.module)
        self._num_backwards = 0
        self._stepped_at: dict[Optimizer, int] = {}
        self._names = {parameter: name for name, parameter in session.module.named_parameters()}
        self._watched = {each: self._watch(each) for each in session.optimizers} if self._is_needed else {}

    def _watch(self, optimizer: Optimizer) -> list[Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        hook = unserializable_hook(partial(self._refuse_outside))
        return [p.register_post_accumulate_grad_hook(hook) for p in parameters if p.requires_grad and not is_dtensor(p)]

    def _refuse_outside(self, parameter: Tensor) -> None:
        if _INSIDE not in self._marks:
            self._refuse(self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}"))  # type: ignore[call-overload]

    def _refuse(self, name: str) -> None:
        raise ModuleError(
            f"The gradient of {name} was computed with backward() instead of manual_backward, although "
            f"{'the precision scales losses' if self._scales else 'several ranks share the step'}: it would be this "
            "rank's own. Call self.manual_backward(loss) instead of loss.backward()."
        )

    def backward(self, manual_backward: Callable[..., None]) -> Callable[..., None]:
        """Return ``manual_backward`` as the module calls it."""
        return partial(self._backward, manual_backward) if self._is_needed else manual_backward

    def _backward(self, manual_backward: Callable[..., None], *args: object, **kwargs: object) -> None:
        self._num_backwards += 1
        self._marks[_INSIDE] = True
        try:
            manual_backward(*args, **kwargs)
        finally:
            del self._marks[_INSIDE]

    def step(
        self, optimizer: Optimizer, step: Callable[[Callable[[], object] | None], object]
    ) -> Callable[[Callable[[], Any] | None], object]:
        """Return ``step`` of an optimizer as the module calls it."""
        return partial(self._step, optimizer, step) if self._is_needed else step

    def _step(
        self,
        optimizer: Optimizer,
        step: Callable[[Callable[[], object] | None], object],
        closure: Callable[[], object] | None,
    ) -> object:
        if closure is None and self._stepped_at.get(optimizer, 0) == self._num_backwards:
            self._check_gradients(optimizer)
        loss = step(closure)
        self._stepped_at[optimizer] = self._num_backwards
        for handle in self._watched.pop(optimizer, ()):
            handle.remove()
        return loss

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no ``manual_backward`` since the last step has computed, if they were not assigned."""
        held: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in held:
            if parameter.grad is not None and (self._scales or is_dtensor(parameter)):
                self._refuse(self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}"))
