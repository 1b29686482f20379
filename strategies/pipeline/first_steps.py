"""FirstSteps: the first micro-batch of each kind, in stages and as a whole on one rank, which must be the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import EchelonError, ModuleError
from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors
from ..module.traces import Traceless
from ..module.untouched import steps_of
from ..state.dtensor import is_dtensor
from ..torch_internals.modules import find_buffer_dict, find_parameter_dict
from ..torch_internals.tensors import read_version
from .absent import Written, attributes_of
from .counting import TOLERANCES, Observed, Tolerance, first_difference
from .partition import HOOK
from .schedule import Schedule
from .spec import specs_of
from .stages import StagedModule
from .work import StepContext

_TOLERANCE_OF_CUT_LAYERS: Final = 1e-3
_TOLERANCE_OF_HALF: Final = 5e-2
_MOST_NAMED: Final = 4
_STATE: Final = (bool, int, float, str, type(None), Tensor, torch.Generator)
"""What may be sent of the attributes of a part."""


class FirstSteps:
    """Compares what a pipeline computes with the user's step, run as a whole on the rank that has the loss.

    That rank gets the parameters of other stages for the time of a part's call, and so holds those of one part at a
    time. The whole run comes first and leaves no trace; it draws the same random numbers. Each kind of step is compared
    once for each structure of batch. Collective: every rank of the pipeline makes one.

    Args:
        staged: the module, on the stages of this rank.
        schedule: which rank has which stages.
        collectives: of the ranks of this pipeline.
        around: what surrounds the steps. If ranks of other pipelines take part in a run, whose batches may have other
            structures, only the first step of each kind is compared.
    """

    def __init__(self, staged: StagedModule, schedule: Schedule, collectives: Collectives, around: StepContext) -> None:
        self.staged, self._module, self._partition = staged, staged.module, staged.partition
        self._schedule, self._collectives, self._around = schedule, collectives, around
        self._together = around.together or collectives
        self._last = schedule.rank_of(schedule.num_stages - 1)
        self._known: set[Hashable] = set()
        self._compared: set[Hashable] = set()
        self._first_state = {name: _State(self._module.get_submodule(name)) for name in self._partition.parts}

    def begin(self) -> None:
        """Compare all kinds of steps again, in another run."""
        self._known.clear()
        self._compared.clear()

    @contextmanager
    def compared(
        self, signatures: Sequence[Any], position: int, run: Callable[[int], object], values: Callable[[], object]
    ) -> Iterator[None]:
        """Compare the steps that run inside with whole runs, if there are new ones among them. Collective.

        Args:
            signatures: of the micro-batches, see `signature_of`.
            position: of the window in the run, see `Draws.begin`.
            run: runs the step of a micro-batch, by its index.
            values: returns the arguments of the steps.

        Raises:
            ModuleError: on all ranks, for a result that differs.
            EchelonError: on all ranks, if a whole run raised it.
        """
        new = [index for index, signature in enumerate(signatures) if signature not in self._known]
        self._known.update(signatures)
        new = [index for index in new if self._is_new(signatures[index])]
        if not new or self._collectives.is_fake:
            yield
            return
        whole = self._run_whole(range(max(new) + 1), position, run, values())
        staged = self.staged.observed = Observed()
        try:
            yield
        finally:
            self.staged.observed = None
        self._compare(new, whole, staged, signatures[0][0])

    def _is_new(self, signature: Any) -> bool:
        step_name, _, leaves = signature
        forms = tuple(
            (leaf[0], leaf[1], len(leaf[2])) if len(leaf) == 3 else (leaf[0], type(leaf[1])) for leaf in leaves
        )
        structure = (step_name, forms) if self._around.evaluates_alone else step_name
        if structure in self._compared:
            return False
        self._compared.add(structure)
        return True

    # --- the whole run -----------------------------------------------------------------------------------------------

    def _run_whole(
        self, indices: Sequence[int], position: int, run: Callable[[int], object], values: object
    ) -> _WholeRun | None:
        """Return what whole runs compute, on the rank that makes them; the others lend it their parts."""
        whole: _WholeRun | None = None
        if self._collectives.rank == self._last:
            states = [self._collectives.recv(rank) for rank in self._others()]
            whole = _WholeRun(self, indices)
            traceless = Traceless(self._module, (*steps_of(self._module), values))
            with self._around.comparing(), traceless, torch.no_grad():
                for state in states:
                    for part, content in state.items():
                        self._first_state[part].set(content)
                whole.make(position, run)
            for rank in self._others():
                self._collectives.send(None, rank)
        else:
            self._collectives.send(self._own_state(), self._last)
            while (name := self._collectives.recv(self._last)) is not None:
                self._collectives.send(self._lent_parameters(self._module.get_submodule(name)), self._last)
        self.staged.attributes.note(self._collectives.broadcast(whole and whole.written, self._last))
        error = whole and whole.error
        self._raise_first(error if isinstance(error, EchelonError) else None)
        return whole

    def _raise_first(self, own: EchelonError | None) -> None:
        """Raise what one of the ranks that compute steps together has to raise, on all of them. Collective."""
        first = next(filter(None, self._together.all_gather_object(own)), None)
        if first is not None:
            raise own or first

    def _others(self) -> list[int]:
        return [rank for rank in range(self._schedule.num_ranks) if rank != self._last]

    def _rank_of(self, part: str) -> int:
        """Return the rank that lends a part; that of the whole run if it has the part itself."""
        ranks = [self._schedule.rank_of(stage) for stage in self._partition.owners(part)]
        return self._last if self._last in ranks else ranks[0]

    def _own_state(self) -> dict[str, object]:
        rank = self._collectives.rank
        return {
            name: self._first_state[name].changed() for name in self._partition.parts if self._rank_of(name) == rank
        }

    def _lent_parameters(self, part: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a part for the rank that runs it. Collective: the ranks that share them."""
        return {name: self._around.lent(p) if is_dtensor(p) else p.detach() for name, p in part.named_parameters()}

    @contextmanager
    def with_parameters(self, name: str, part: nn.Module) -> Iterator[None]:
        """Put the parameters of another rank's part into it, inside the block.

        Those that a part of this rank shares are replaced, too: if tp has cut them, only the layers here can use them.
        """
        rank = self._rank_of(name)
        if rank == self._last:
            yield
            return
        self._collectives.send(name, rank)
        lent = self._collectives.recv(rank)
        values = {
            parameter: nn.Parameter(lent[own], requires_grad=parameter.requires_grad)
            for own, parameter in part.named_parameters()
        }
        places = [
            (find_parameter_dict(submodule), key, parameter)
            for submodule in part.modules()
            for key, parameter in find_parameter_dict(submodule).items()
            if parameter is not None
        ]
        for parameters, key, parameter in places:
            parameters[key] = values[parameter]
        try:
            yield
        finally:
            for parameters, key, parameter in places:
                parameters[key] = parameter

    # --- the comparison ----------------------------------------------------------------------------------------------

    def _compare(self, indices: Sequence[int], whole: _WholeRun | None, staged: Observed, step_name: str) -> None:
        logged = self._collectives.all_gather_object(staged.logged)
        found, error = None, None
        if whole is not None and whole.error is not None:
            warnings.warn(
                f"The first {step_name} in stages could not be compared with a whole one on one rank, which failed: "
                f"{type(whole.error).__name__}: {str(whole.error)[:200]}. Nothing else depends on it.",
                stacklevel=2,
            )
        elif whole is not None and not (whole.has_drawn and self._around.has_cut_layers):
            staged.logged = sorted((one for of_rank in logged for one in of_rank), key=lambda one: one[:2])
            found = self._first_found(indices, whole, staged)
        if found:
            error = ModuleError(
                f"{step_name} of {type(self._module).__name__} computes something else in stages "
                f"(pp={self._schedule.num_ranks}) than as a whole on one rank: {found}. What the step uses of a block "
                "after the call (attributes, lists, what hooks collect) is on the block's own stage only: let the "
                f"blocks pass it on in their outputs, name them for the stage that uses it in {HOOK}(num_stages), or "
                "use dp_shard instead of pp."
            )
        self._raise_first(error)

    def _first_found(self, indices: Sequence[int], whole: _WholeRun, staged: Observed) -> str | None:
        tolerance, kept = whole.tolerance(is_cut=self._around.has_cut_layers), whole.kept_elsewhere()
        for index in indices:
            found = first_difference(whole.observed, staged, index, tolerance)
            if found:
                return f"{found}. Not passed between stages: {', '.join(kept[:_MOST_NAMED])}" if kept else found
        return None


class _WholeRun:
    """Whole runs of a step on one rank, and what they have computed."""

    def __init__(self, steps: FirstSteps, indices: Sequence[int]) -> None:
        self._steps, self._indices = steps, indices
        self.staged = steps.staged
        self.observed = Observed()
        self.written: list[Written] = []
        """The attributes that parts have written tensors into."""
        self.changed: list[tuple[str, str]] = []
        """Parts, and the attributes that have changed in their calls, by their whole names."""
        self.has_drawn = self.is_low = False
        """Whether parts have drawn random numbers, and whether anything was computed in half precision."""
        self.error: Exception | None = None

    def make(self, position: int, run: Callable[[int], object]) -> None:
        """Run the steps; an error is kept."""
        module, draws = self.staged.module, self.staged.draws
        draws.begin(position)
        self.staged.observed = self.observed
        try:
            for index in self._indices:
                vars(module)["log"] = self._note_of(index)
                with self.staged.whole(_WholePass(self, self._steps, index)):
                    run(index)
        except Exception as error:  # noqa: BLE001 - Echelon's own is raised on all ranks; others are raised in stages
            self.error = error
        finally:
            self.staged.observed = None
            draws.end(len(self._indices))

    def _note_of(self, index: int) -> Callable[..., None]:
        def log(name: str, value: object, *_: object, **__: object) -> None:
            self.observed.note(index, 0, name, value)

        return log

    def tolerance(self, *, is_cut: bool) -> Tolerance:
        """Return a function of the tolerance of values of a dtype."""

        def of(dtype: torch.dtype) -> float:
            if self.is_low or dtype not in TOLERANCES:
                return _TOLERANCE_OF_HALF
            return _TOLERANCE_OF_CUT_LAYERS if is_cut and dtype == torch.float32 else TOLERANCES[dtype]

        return of

    def kept_elsewhere(self) -> list[str]:
        """Return the attributes that parts have changed that are not on the last stage."""
        owners, last = self.staged.owners, self.staged.partition.num_stages - 1
        return list(dict.fromkeys(name for part, name in self.changed if last not in owners[part]))


class _WholePass:
    """One micro-batch as a whole: all parts run here."""

    def __init__(self, whole: _WholeRun, steps: FirstSteps, index: int) -> None:
        self._whole, self._steps, self._staged, self.index = whole, steps, whole.staged, index
        self.output: Any = None

    def call(self, name: str, part: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
        """Run a part with the random numbers that it draws on its stage, and note what it changes."""
        draws, whole = self._staged.draws, self._whole
        before = self._attributes_around(name, part)
        with (
            self._steps.with_parameters(name, part),
            draws.of_part(self.index, name) if part.training else nullcontext(),
        ):
            start = draws.states()
            output = run(*args, **kwargs)
            whole.has_drawn |= any(not torch.equal(*pair) for pair in zip(start, draws.states(), strict=True))
        if name in self._staged.ends:
            draws.cross(self.index, self._staged.ends[name])
        tensors = [tensor for tensor in iterate_tensors(output) if tensor.is_floating_point()]
        whole.is_low |= any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors)
        whole.is_low |= any(tensor.dtype not in TOLERANCES for tensor in tensors)
        self._note_changes(name, part, before)
        return output

    def check_complete(self, *, was_cut: bool) -> None:
        """Accept any step: what a pipeline needs is checked in its stages."""

    def _attributes_around(self, name: str, part: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Return the attributes of a part's submodules, and of the modules that hold it, with their contents."""
        around = [name[:end] for end in range(len(name)) if name[end] == "."]
        owners = {"": self._staged.module, **{at: self._staged.module.get_submodule(at) for at in around}}
        owners |= {f"{name}.{own}".rstrip("."): submodule for own, submodule in part.named_modules()}
        return {
            (owner, attribute): (value, _changeable_content(value))
            for owner, submodule in owners.items()
            for attribute, value in attributes_of(submodule).items()
        }

    def _note_changes(self, name: str, part: nn.Module, before: Mapping[tuple[str, str], tuple[Any, Any]]) -> None:
        for (owner, attribute), (value, content) in self._attributes_around(name, part).items():
            old = before.get((owner, attribute))
            if old is not None and old[0] is value and _are_same(old[1], content):
                continue
            self._whole.changed.append((name, f"{owner}.{attribute}".lstrip(".")))
            is_inside = f"{owner}.".startswith(f"{name}.")
            if is_inside and any(True for _ in iterate_tensors(value)):
                self._whole.written.append(Written(name, owner, attribute, specs_of(value)))


def _changeable_content(value: object) -> tuple[object, ...]:
    """Return what makes up a value that can change in place."""
    if isinstance(value, Tensor):
        return (read_version(value),)
    if isinstance(value, list | tuple):
        return tuple(value)
    return tuple(value.values()) if isinstance(value, dict) else ()


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(one, other, strict=True)
    )


# --- state of parts --------------------------------------------------------------------------------------------------


class _State:
    """The buffers of a part, and those of its attributes that have changed since this object was made."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._first = {(name, key): (value, _changeable_content(value)) for name, key, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[str, str, Any]]:
        for name, submodule in self._part.named_modules():
            for key, value in attributes_of(submodule).items():
                if isinstance(value, _STATE):
                    yield name, key, value

    def changed(self) -> list[tuple[str, str, Any]]:
        """Return submodule, name and value of each; a generator as its state."""
        content = [(*key.rpartition(".")[::2], buffer.detach()) for key, buffer in self._part.named_buffers()]
        for name, key, value in self._attributes():
            first, content_first = self._first.get((name, key), (_State, ()))
            if isinstance(value, torch.Generator):
                content.append((name, key, value.get_state()))
            elif isinstance(value, Tensor):
                if value is not first or not _are_same(_changeable_content(value), content_first):
                    content.append((name, key, value.detach()))
            elif type(first) is not type(value) or first != value:
                content.append((name, key, value))
        return content

    def set(self, content: list[tuple[str, str, Any]]) -> None:
        """Give the part here what another rank's has."""
        for name, key, value in content:
            owner: Any = self._part.get_submodule(name)
            if key in (buffers := find_buffer_dict(owner)):
                buffers[key] = value
            elif isinstance(vars(owner).get(key), torch.Generator):
                vars(owner)[key].set_state(value)
            else:
                vars(owner)[key] = value
