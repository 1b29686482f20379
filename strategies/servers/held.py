"""HeldOptimizer: what a server holds of an optimizer, and its updates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.pickling import unpack_value
from ..state.optimizer_state import remake_optimizer
from ..torch_internals.tensors import find_values
from .flat_layout import FlatLayout
from .messages import Assignment, Push, Rows, Update, Updated


class HeldOptimizer:
    """Parameters with their optimizer, whose gradients come from trainers.

    Parameters that are pushed whole are views of flat tensors, and so are their gradients. A table gets gradients
    for some rows; its optimizer sees a dense gradient, as with ``nn.Embedding``, or a sparse one.

    Args:
        assignment: the parameters and the optimizer.
        num_trainers: the number of trainers.
    """

    def __init__(self, assignment: Assignment, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._sparse, self._trained = assignment.sparse, list(assignment.trained)
        trained = [assignment.values[name] for name in self._trained]
        self._layout = FlatLayout(trained)
        self.flats = self._layout.join(trained)
        self._gradients = [torch.zeros_like(flat) for flat in self.flats]
        views = dict(zip(self._trained, self._layout.views(self.flats), strict=True))
        self.parameters = {
            name: nn.Parameter(views.get(name, value.contiguous()), requires_grad=False)
            for name, value in assignment.values.items()
        }
        self._views = dict(zip(self._trained, self._layout.views(self._gradients), strict=True))
        self._tables = {name: p for name, p in self.parameters.items() if name not in views}
        self._touched: dict[str, Tensor] = {}
        groups = [
            {**group, "params": [self.parameters[name] for name in group["params"]]} for group in assignment.groups
        ]
        kind, attributes = unpack_value(assignment.optimizer)
        self.optimizer: Optimizer = remake_optimizer(kind, attributes, groups)
        self.optimizer.state.update(_state_of(assignment.state, self.parameters))
        self._pushes: dict[int, tuple[Push, Future[object]]] = {}
        self._updated: tuple[int, Updated] | None = None

    # --- sync: the gradients of all trainers meet --------------------------------------------------------------------

    def gather(self, push: Push) -> Future[object]:
        """Take the gradients of a trainer; the answer comes when those of all trainers have arrived.

        The answer is `Updated`, or the sum of the squared gradients for a push that is not final.
        """
        answer: Future[object] = Future()
        self._pushes[push.trainer] = push, answer
        if len(self._pushes) == self._num_trainers:
            pushes, answers = zip(*(self._pushes[trainer] for trainer in range(self._num_trainers)), strict=True)
            self._pushes = {}
            try:
                self._meet(pushes)
                value = self._update(push.step, pushes[0].generator) if push.is_final else self._squared_norm()
            except Exception as error:  # noqa: BLE001 - each trainer raises it
                for waiting in answers:
                    waiting.set_exception(error)
            else:
                for waiting in answers:
                    waiting.set_result(value)
        return answer

    @property
    def missing(self) -> list[int]:
        """The trainers whose gradients others wait for."""
        return [trainer for trainer in range(self._num_trainers) if trainer not in self._pushes] if self._pushes else []

    def update(self, request: Update) -> Updated:
        """Update with the gathered gradients: once, for the trainer that asks first."""
        if self._updated is not None and self._updated[0] == request.step:
            return self._updated[1]
        with torch.no_grad():
            for gradient in self._all_gradients():
                if request.factor != 1.0:
                    gradient.mul_(request.factor)
                if request.limit is not None:
                    gradient.clamp_(-request.limit, request.limit)
        return self._update(request.step, request.generator)

    @torch.no_grad()
    def _meet(self, pushes: Sequence[Push]) -> None:
        """Set the gradients to the means over the trainers, added in the order of their ranks."""
        for index, gradient in enumerate(self._gradients):
            gradient.copy_(pushes[0].flats[index])
            for push in pushes[1:]:
                gradient.add_(push.flats[index])
            if len(pushes) > 1:
                gradient.div_(len(pushes))
        used = [any(flags) for flags in zip(*(push.used for push in pushes), strict=True)]
        rows = {name: [push.rows[name] for push in pushes if name in push.rows] for name in self._tables}
        self._set_gradients(used, rows, len(pushes))
        for push in pushes:
            self._take_settings(push.settings)

    def _update(self, step: int, generator: Tensor | None = None) -> Updated:
        before = _copy_settings(self.optimizer)
        if generator is None:
            self.optimizer.step()
        else:  # the trainers' own, which go on after what the optimizer draws, as in one process
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(generator)
                self.optimizer.step()
                generator = torch.get_rng_state()
        changed = [
            {name: value for name, value in after.items() if _has_changed(old.get(name), value)}
            for old, after in zip(before, _copy_settings(self.optimizer), strict=True)
        ]
        updated = Updated(self.flats, changed, generator)
        self._updated = step, updated
        return updated

    # --- async: the gradients of one trainer -------------------------------------------------------------------------

    def apply(self, push: Push) -> None:
        """Update with the gradients of one trainer."""
        self._meet([push])
        self._update(push.step)

    def copy(self) -> list[Tensor]:
        """Return the parameters as they are now, while others may change them."""
        return [flat.clone() for flat in self.flats]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _set_gradients(self, used: Sequence[bool], rows: Mapping[str, Sequence[Rows]], number: int) -> None:
        for name, is_used in zip(self._trained, used, strict=True):
            self.parameters[name].grad = self._views[name] if is_used else None
        for name, parts in rows.items():
            parameter = self.parameters[name]
            if not parts:
                parameter.grad = None
                continue
            ids = torch.cat([part.ids for part in parts]).long()
            values = torch.cat([part.values for part in parts])
            values = values / number if number > 1 else values
            if name in self._sparse:
                parameter.grad = torch.sparse_coo_tensor(
                    ids[None], values, parameter.shape, check_invariants=False
                ).coalesce()
                continue
            if name not in self._views:
                self._views[name] = torch.zeros_like(parameter)
            gradient = self._views[name]
            if name in self._touched:
                gradient[self._touched[name]] = 0
            gradient.index_add_(0, ids, values)
            self._touched[name] = ids
            parameter.grad = gradient

    def _all_gradients(self) -> list[Tensor]:
        """Return the flat gradients, and those of the tables."""
        tables = [parameter.grad for parameter in self._tables.values() if parameter.grad is not None]
        return [*self._gradients, *map(find_values, tables)]

    def _squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(gradient).double() for gradient in self._all_gradients()]
        return sum(float(norm.square()) for norm in norms)

    def _take_settings(self, settings: Sequence[Mapping[str, object]] | None) -> None:
        for group, new in zip(self.optimizer.param_groups, settings or (), strict=settings is not None):
            group.update(new)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the state of some parameters, by name."""
        own = self.optimizer.state
        return {name: dict(own[self.parameters[name]]) for name in names if self.parameters[name] in own}

    @torch.no_grad()
    def set_values(self, flats: Sequence[Tensor]) -> None:
        """Set the values of the parameters that are pushed whole."""
        for flat, new in zip(self.flats, flats, strict=True):
            flat.copy_(new)


def _has_changed(old: object, new: object) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return not (old.dtype == new.dtype and old.shape == new.shape and torch.equal(old, new))
    if isinstance(old, list) and isinstance(new, list):
        return len(old) != len(new) or any(map(_has_changed, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() != new.keys() or any(_has_changed(old[key], value) for key, value in new.items())
    return old is not new and (isinstance(new, Tensor) or bool(old != new))


def _copy_settings(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return the settings of each group, with copies of what a step may change in place."""
    return [
        {name: _copy_if_mutable(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _copy_if_mutable(value: object) -> object:
    return copy.deepcopy(value) if isinstance(value, Tensor | list | dict) else value


def _state_of(state: Mapping[str, dict[str, object]], parameters: Mapping[str, nn.Parameter]) -> dict[Tensor, object]:
    return {parameters[name]: value for name, value in state.items() if name in parameters}
