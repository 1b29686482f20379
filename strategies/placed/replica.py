"""PlacedReplica: a module of which every process has a replica, whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch import Tensor, nn

from ..parallel.equal_ranks import overrides_hook
from ..parallel.replica import Replica
from ..parallel.replica_check import ReplicaCheck, ReplicaDifference
from ..parallel.step_caller import BeginSum
from .placed import Placed, Site


class PlacedReplica(Placed):
    """A `Replica` of the module in this process.

    Args:
        site: where it lies.
        module: the module.
        replica: synchronizes its gradients.
        check: compares the replicas; None where there is nothing to compare.
    """

    def __init__(self, site: Site, module: nn.Module, replica: Replica, check: ReplicaCheck | None) -> None:
        super().__init__(site, module)
        self._replica, self._check = replica, check

    def step_fn(self, step_name: str) -> Callable[..., object]:
        return self._replica.step_fn(step_name) if self.precision.is_plain else super().step_fn(step_name)

    def _run(self, step_name: str, *args: object) -> object:
        with self.forward_context:
            return self._replica.step_fn(step_name)(*args)

    def set_grad_sync(self, enabled: bool) -> None:
        self._replica.set_grad_sync(enabled)

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        loss = self._replica.zero_loss()
        with nullcontext() if self._check is None else self._check.absent():
            if loss is None:
                super().stand_by(step_name, busy, run)
            else:
                self.backward(loss)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        super().backward(loss, *args, **kwargs)
        self.end_backward()

    def end_backward(self) -> None:
        self._replica.end_backward()
        if self._check is not None:
            self._check.count_backward()

    def sum_with_gradients(self) -> BeginSum | None:
        """Return what adds up numbers of each step with its gradients.

        None if DDP cannot do that, or if a subclass or the module has a backward of its own, behind which gradients are
        not averaged before `end_backward` where nothing was to be added up.
        """
        own, kind = type(self), PlacedReplica
        is_plain = own.backward is kind.backward and own.end_backward is kind.end_backward
        return self._replica.sum_with_gradients() if is_plain and not overrides_hook(self.module, "backward") else None

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        if not only_compares:
            self._replica.sync_replicas()
        return None if self._check is None else self._check.compare(with_buffers=with_buffers)


def sum_with_gradients(placed: object) -> BeginSum | None:
    """Return what adds up a few numbers of a step between its forward and its backward, at no cost of its own.

    None if the module is placed in another way. Collective: every rank calls it, once.
    """
    return placed.sum_with_gradients() if isinstance(placed, PlacedReplica) else None
