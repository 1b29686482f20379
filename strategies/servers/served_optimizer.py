"""ServedOptimizer: a user's optimizer whose parameters are updated by servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import ModuleError
from ..distributed.collectives import Collectives
from ..distributed.pickling import PICKLING_ERRORS, pack_value
from ..state.optimizer_state import attributes_of, parameter_names
from ..torch_internals.optimizers import note_step, put_step_back, replace_step
from ..torch_internals.tensors import copy_together
from .connection import Connection
from .flat_layout import FlatLayout, deal_names, have_same_bits
from .messages import Assignment, Push, Rows, Update, Updated
from .served_state import (
    ServedState,
    Versions,
    are_same,
    multiply_gradients,
    raise_if_unsendable,
    sparse_gradient,
    versions_of,
)


class ServedOptimizer:
    """A user's optimizer whose parameters and state are held, and updated, by servers.

    Schedulers, callbacks and the gradient scaler keep the user's object, with all its groups and no state of served
    parameters. Its ``step`` is replaced: it pushes this trainer's gradients, and takes the parameters that the servers
    have updated. Parameters that are not served are updated as before.

    What changes between two steps is sent before the next push: groups that were added, parameters that were frozen,
    state and weights that were loaded or edited.

    Args:
        optimizer: the user's.
        key: its number.
        module: whose parameters it has.
        connection: to the servers.
        collectives: of the trainers.
        holders: the server of each parameter that is served, by name.
        tables: the names of the parameters whose rows are pushed, and whether their gradients are sparse.
        is_async: whether each push is an update of its own.
        may_draw: whether its step may draw random numbers; in sync mode they are those of this trainer's generator.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: int,
        module: nn.Module,
        connection: Connection,
        collectives: Collectives,
        *,
        holders: Mapping[str, int],
        tables: Mapping[str, bool],
        is_async: bool,
        may_draw: bool = False,
    ) -> None:
        self.optimizer, self.key = optimizer, key
        self._module, self._connection, self._collectives = module, connection, collectives
        self._holders, self._tables, self._is_async = holders, tables, is_async
        self._sends_generator = may_draw and not is_async
        self._step_of_others = optimizer.step
        self._signature: object = None
        self._state: ServedState | None = None
        """What the user's optimizer has for its state, unless a hook replaces it."""
        self._agreed: list[Tensor] = []
        """On trainer 0 of sync mode: the values that the servers have of what is pushed, in the order of `_trained`."""
        self._has_loaded_weights = False
        self._num_pushes = self._num_pushes_pulled = 0
        self._has_gathered = False
        self._factor = 1.0
        self._limit: float | None = None
        self._clipped: Versions | None = None
        """The gradients as they were clipped in this step."""
        self._named: dict[str, nn.Parameter] = {}
        self._trained: dict[int, list[str]] = {}
        self._layouts: dict[int, FlatLayout] = {}
        self.staleness: Sequence[float] = ()
        """See `Updated`."""
        if not tables:
            step: object = partial(Optimizer.profile_hook_step(self._step), optimizer)
        else:
            step = partial(self._step_some, optimizer)
        self._replaced = replace_step(optimizer, step)

    @property
    def is_assigned(self) -> bool:
        """Whether the servers have parameters and state."""
        return self._signature is not None

    # --- what the servers hold ---------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Send what has changed since the last step. Collective: every trainer calls it."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        signature = [(id(parameter), parameter.requires_grad) for parameter in parameters]
        has_other_state = self._has_other_state()
        if signature != self._signature or has_other_state or self._has_loaded_weights:
            self._assign(has_other_state=has_other_state)
            self._signature, self._has_loaded_weights = signature, False
        elif self._has_edited_weights():
            flats = {index: layout.join(self._own(index)) for index, layout in self._layouts.items()}
            self._connection.ask("set_values", {index: (self.key, flat) for index, flat in flats.items()})
            self._agreed = self._views(flats)

    def _has_other_state(self) -> bool:
        """Return whether the state was loaded, replaced or cleared: also by one without entries."""
        state = self.optimizer.state
        if self._state is None or state is not self._state or state.is_cleared:
            return True
        return bool(state) and any(parameter in state for parameter in self._named.values())

    def _has_edited_weights(self) -> bool:
        # compare values: no version counter sees changes to the ``data`` of a parameter
        pairs = zip(self._pushed, self._agreed, strict=True) if self._agreed else ()
        return not all(have_same_bits(parameter.detach(), value) for parameter, value in pairs)

    @property
    def _can_be_edited(self) -> bool:
        # in async mode the servers also apply the pushes of others
        return not self._tables and not self._is_async and self._connection.rank == 0

    @property
    def _pushed(self) -> list[Tensor]:
        return [self._named[name] for index in self._layouts for name in self._trained[index]]

    def _own(self, index: int) -> list[Tensor | None]:
        return [self._named[name] for name in self._trained[index]]

    def _views(self, flats: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        """Return the values in flat tensors of the parameters that are pushed, on the devices of these."""
        values = [value for index, layout in self._layouts.items() for value in layout.views(flats[index])]
        return [value.to(parameter.device) for parameter, value in zip(self._pushed, values, strict=True)]

    def _assign(self, *, has_other_state: bool) -> None:
        """Deal parameters, groups and state to the servers."""
        optimizer = self.optimizer
        names = parameter_names(optimizer, self._module)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(names, parameters, strict=True)
        named = {name: parameter for name, parameter in pairs if name in self._holders}
        if has_other_state:
            state = {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
        else:  # one that was exchanged for another has none, as in one process
            state = self.fetch_state([name for name, p in self._named.items() if named.get(name) is p])
        self._named = named
        servers = sorted({self._holders[name] for name in named})
        self._trained = {
            index: [
                n for n, p in named.items() if self._holders[n] == index and p.requires_grad and n not in self._tables
            ]
            for index in servers
        }
        self._layouts = {index: FlatLayout([named[n] for n in trained]) for index, trained in self._trained.items()}
        with self._collectives.fail_together():  # only trainer 0 finds out what cannot be sent
            if self._connection.rank == 0:
                packed = pack_value((type(optimizer), attributes_of(optimizer)), type(optimizer).__name__)
                assignments = {index: (self.key, self._assignment(index, packed, state)) for index in servers}
                self._send("assign", assignments)
        served = {parameter: name for name, parameter in named.items()}
        own = {parameter: value for parameter, value in optimizer.state.items() if parameter not in served}
        optimizer.state = self._state = ServedState(own, served)
        self._agreed = [p.detach().clone() for p in self._pushed] if self._can_be_edited else []

    def _assignment(self, index: int, packed: bytes, state: Mapping[str, Any]) -> Assignment:
        held = {name: p for name, p in self._named.items() if self._holders[name] == index}
        by_parameter = {parameter: name for name, parameter in held.items()}
        groups = [
            {**group, "params": [by_parameter[p] for p in group["params"] if p in by_parameter]}
            for group in self.optimizer.param_groups
        ]
        return Assignment(
            optimizer=packed,
            groups=groups,
            trained=self._trained[index],
            sparse=frozenset(name for name in held if self._tables.get(name)),
            values={n: torch.empty(0) if n in self._tables else p.detach().cpu() for n, p in held.items()},
            state={name: _on_cpu(values) for name, values in state.items() if name in held},
        )

    def fetch_state(self, names: Sequence[str]) -> dict[str, dict[str, object]]:
        """Return the state of these parameters from their servers."""
        wanted = self._by_server(names)
        answers = self._connection.ask("state", {index: (self.key, own) for index, own in wanted.items()})
        return {name: values for answer in answers.values() for name, values in answer.items()}

    def _by_server(self, names: Sequence[str]) -> dict[int, list[str]]:
        wanted: dict[int, list[str]] = {}
        for name in names:
            wanted.setdefault(self._holders[name], []).append(name)
        return wanted

    def own_state(self) -> dict[str, dict[str, object]]:
        """Return this trainer's share of the state that servers hold: each trainer saves another one."""
        sizes = {name: parameter.numel() for name, parameter in self._named.items()}
        return self.fetch_state(deal_names(sizes, self._collectives.world_size)[self._connection.rank])

    def come_home(self, *, has_failed: bool) -> None:
        """Give the user's object its own step and state; that of a run that has failed only if servers still answer."""
        put_step_back(self.optimizer, self._replaced)
        if not self.is_assigned:
            return
        if self._has_other_state():
            self.optimizer.state = defaultdict(dict, self.optimizer.state)
            return
        state: dict[str, dict[str, object]] = {}
        for index, names in self._by_server(list(self._named)).items():
            if not has_failed:
                state |= self._connection.ask("state", {index: (self.key, names)})[index]
            elif (answer := self._connection.try_ask("state", index, self.key, names)) is not None:
                state |= answer
            else:
                return
        here: defaultdict[Tensor, object] = defaultdict(dict, self.optimizer.state)
        here.update((self._named[name], _on_device(values, self._named[name])) for name, values in state.items())
        self.optimizer.state = here

    @torch.no_grad()
    def pull(self) -> None:
        """Take the parameters as the servers have them now, unless no trainer has pushed since they were taken last."""
        if self.is_assigned and not self._tables and self._num_pushes != self._num_pushes_pulled:
            answers = self._connection.ask("values", dict.fromkeys(self._layouts, (self.key,)))
            self._copy(answers)
            self._num_pushes_pulled = self._num_pushes

    def take_weights(self) -> None:
        """Note that trainer 0 has loaded other weights, which the servers get before the next push."""
        self._has_loaded_weights = True

    # --- the step ----------------------------------------------------------------------------------------------------

    def gather(self) -> float:
        """Push the gradients, and return the sum of the squares of their means over the trainers. Collective."""
        answers = self._push(is_final=False)
        self._has_gathered = True
        return float(sum(answers.values()))

    def scale(self, factor: float) -> None:
        """Multiply the gathered gradients in the next update, and this trainer's, of which further steps are made."""
        self._factor, self._limit = factor, None
        if factor != 1.0:
            multiply_gradients(self._named.values(), factor)
        self._clipped = versions_of(self._named.values())

    def limit(self, limit: float) -> None:
        """Clip each element of the gathered gradients in the updates with the same gradients."""
        self._limit, self._clipped = limit, versions_of(self._named.values())

    def end_step(self) -> None:
        """Forget how the gradients of this step were clipped."""
        self._limit = self._clipped = None

    def _finish_clipping(self) -> None:
        """Gather gradients again that have changed since, or that are clipped for a second step.

        Raises:
            ModuleError: for some that were clipped by value, which only servers have, and were then edited.
        """
        if self._clipped is None:
            return
        is_same = are_same(self._clipped, versions_of(self._named.values()))
        if self._has_gathered and not is_same and self._limit is not None:
            raise ModuleError(
                "strategy='ps' clips by value the mean of all trainers' gradients, on the servers, and gradients were "
                "edited after that; edit them before self.clip_gradients, clip by norm, or use strategy='ddp'."
            )
        if not is_same:
            self._has_gathered, self._factor, self._limit, self._clipped = False, 1.0, None, None
        elif not self._has_gathered and self._limit is not None:
            self.gather()

    def _step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        note_step(optimizer)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._finish_clipping()
        if self._has_gathered:
            step = self._num_pushes - 1
            request = Update(self._connection.rank, step, self._factor, self._limit, self._generator())
            answers = self._connection.ask("update", dict.fromkeys(self._layouts, (self.key, request)))
            self._has_gathered, self._factor = False, 1.0
        else:
            answers = self._push(is_final=True)
        self._take(answers)
        return result

    def _step_some(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> object:
        """Step where servers hold only tables, and this trainer holds the rest."""
        self._step(optimizer)
        tables = [self._named[name] for name in self._named]
        gradients = [table.grad for table in tables]
        for table in tables:
            table.grad = None
        try:
            return self._step_of_others(closure) if closure is not None else self._step_of_others()
        finally:
            for table, gradient in zip(tables, gradients, strict=True):
                table.grad = gradient

    def _push(self, *, is_final: bool) -> dict[int, Any]:
        self.follow()
        self._has_gathered = False  # left from a step that was skipped because its scaled gradients overflowed
        answers = self._send("push", {index: (self.key, self._message(index, is_final)) for index in self._layouts})
        self._num_pushes += 1
        return answers

    def _send(self, request: str, messages: Mapping[int, tuple[object, ...]]) -> dict[int, object]:
        """Send messages with the settings of groups.

        Raises:
            ConfigError: naming a setting that cannot be sent.
        """
        try:
            return self._connection.ask(request, messages)
        except PICKLING_ERRORS as error:
            raise_if_unsendable(self.optimizer, error)
            raise

    def _message(self, index: int, is_final: bool) -> Push:
        gradients = [self._named[name].grad for name in self._trained[index]]
        for name, gradient in zip(self._trained[index], gradients, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise sparse_gradient(name)
        sends_settings = self._is_async or self._connection.rank == 0
        settings = [{name: v for name, v in group.items() if name != "params"} for group in self.optimizer.param_groups]
        return Push(
            self._connection.rank,
            self._num_pushes,
            [gradient is not None for gradient in gradients],
            self._layouts[index].join(gradients),
            self._rows(index),
            settings if sends_settings else None,
            is_final,
            self._generator() if is_final else None,
        )

    def _generator(self) -> Tensor | None:
        return torch.get_rng_state() if self._sends_generator else None

    def _rows(self, index: int) -> dict[str, Rows]:
        rows = {}
        for name in self._named:
            gradient = self._named[name].grad
            if self._holders[name] == index and name in self._tables and gradient is not None:
                if not gradient.is_sparse:
                    raise ModuleError(
                        f"strategy='ps' pushes only the rows of {name} that its layer looked up, got a gradient of the "
                        "whole table, which is not in this process; use the table only by calling its layer, or leave "
                        "out dense='ddp'."
                    )
                whole = gradient.coalesce()
                ids = whole.indices()[0].cpu()
                rows[name] = Rows(ids.int() if whole.shape[0] < 2**31 else ids, whole.values().cpu())
        return rows

    @torch.no_grad()
    def _take(self, answers: Mapping[int, Updated]) -> None:
        """Take over the parameters and settings that the servers have updated."""
        values = self._copy({index: answer.flats for index, answer in answers.items()})
        self._agreed = values if self._can_be_edited else []
        for answer in answers.values() if not self._tables else ():
            for group, changed in zip(self.optimizer.param_groups, answer.settings, strict=bool(answer.settings)):
                group.update(changed)
            if answer.generator is not None:
                torch.set_rng_state(answer.generator)
        self.staleness = next((answer.staleness for answer in answers.values() if answer.staleness), ())

    def _copy(self, flats: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        values = self._views(flats)
        if values:
            copy_together(self._pushed, values)
        return values

    def ledger(self) -> Tensor:
        """Return the pushes of all trainers to the first server of this optimizer."""
        index = min(self._layouts)
        found: Tensor = self._connection.ask("ledger", {index: (self.key,)})[index]
        return found


def _on_device(values: Mapping[str, object], parameter: Tensor) -> dict[str, object]:
    """Return the state of a parameter as its optimizer would have it here: numbers of steps stay on the CPU."""
    return {n: v.to(parameter.device) if isinstance(v, Tensor) and v.ndim else v for n, v in values.items()}


def _on_cpu(values: Mapping[str, object]) -> dict[str, object]:
    return {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
