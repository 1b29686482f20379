"""StagedModule: a module's own step, run one stage at a time by intercepting the calls of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ...common.errors import ModuleError
from ...common.internals.stack_frames import find_frame
from ..distributed.nested import iterate_tensors, map_tensors, named_leaves
from ..state.dtensor import local_shard
from ..torch_internals.autograd import StopRecomputation, is_wrapped
from ..torch_internals.modules import call_uncompiled, find_compiled_call, set_compiled_call
from .absent import AbsentAttributes, stand_in
from .counting import CountedOnce, Observed
from .draws import Draws
from .partition import HOOK, Partition
from .spec import Shapes, Spec, specs_of


class _Cut(BaseException):
    """The end of a stage inside a step."""


class Answering(Protocol):
    """One run of a step, whose calls of parts it answers."""

    index: int
    output: Any

    def call(self, name: str, part: nn.Module, run: Callable[..., object], args: object, kwargs: object) -> Any:
        """Answer a call to a part."""

    def check_complete(self, *, was_cut: bool) -> None:
        """Check that the step has called what it had to."""


class Pass:
    """One micro-batch on one stage: which parts run, which are replaced by placeholders, and where the step ends.

    Args:
        staged: the module and its stages.
        stage: the stage.
        index: the place of the micro-batch in its window.
        received: what the previous stage has sent; None on the first.
        shapes: of the parts of earlier stages.
    """

    def __init__(
        self, staged: StagedModule, stage: int, index: int, received: object, shapes: Mapping[str, Sequence[object]]
    ) -> None:
        self.staged, self.stage, self.index = staged, stage, index
        self.partition = staged.partition
        self.received, self.shapes = received, shapes
        self.is_last = stage == self.partition.num_stages - 1
        self.has_received = stage == 0
        self.has_ended = False
        self.logs = True
        """Whether to keep what the step logs: from where it receives to where it sends."""
        self.calls: list[str] = []
        """The parts that have run here."""
        self.stood_in: list[str] = []
        """The parts of earlier stages that were called."""
        self.output: object = None
        """What is sent to the next stage."""
        self.specs: dict[str, list[object]] = {}
        """What the parts that have run here returned, where it is to be noted."""
        self.fills: Mapping[str, float] | None = None
        """To trace a value: what stands in for each part, instead of NaN."""
        self._has_grad = torch.is_grad_enabled()

    # --- calls of parts ----------------------------------------------------------------------------------------------

    def call(self, name: str, part: nn.Module, run: Callable[..., object], args: object, kwargs: object) -> object:
        """Answer a call to a part, or end the stage."""
        owners = self.staged.owners[name]
        if self.stage in owners:
            return self._run(name, part, run, args, kwargs)
        if owners[0] > self.stage:
            if not self.has_ended:
                raise self._out_of_order(name, owners[0])
            raise _Cut
        if name in self.staged.ends:
            self.staged.draws.cross(self.index, self.staged.ends[name])
        if name == self.partition.boundary(self.stage - 1):
            self._check_checkpoint(name)
            return self._receive(name)
        number = self.stood_in.count(name)
        self.stood_in.append(name)
        return self._stand_in(name, number)

    def _run(self, name: str, part: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
        is_block = self.partition.parts[name].is_block
        if is_block:
            self._check_order(name)
        if self.staged.is_first_look and self.stage and self.has_received:
            self._check_inputs(name, part, args, kwargs)
        ends = name == self.partition.boundary(self.stage) and not self.is_last
        if ends:
            self._check_checkpoint(name)
        draws = self.staged.draws.of_part(self.index, name) if part.training else nullcontext()
        with draws:
            output = run(*args, **kwargs)
        self.calls.append(name)
        self.specs.setdefault(name, []).append(specs_of(output))
        if ends:
            self._end(name, output)
        return output

    def _end(self, name: str, output: object) -> None:
        leaves = [leaf for _, leaf in named_leaves(output)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)]
        if not tensors or odd:
            raise ModuleError(
                f"{name}, the last part of stage {self.stage}, must return tensors to send to stage {self.stage + 1}, "
                f"got {', '.join(odd) or type(output).__name__}; let it return a tensor, or a list, tuple or dict of "
                "tensors."
            )
        self.output, self.has_ended = output, True
        self.staged.draws.cross(self.index, self.stage)
        self.logs = False

    def _receive(self, name: str) -> object:
        if self.has_received:
            raise ModuleError(
                f"{name} on stage {self.stage - 1} was called twice in one step, but stage {self.stage} receives its "
                "output only once; call it once, or put both stages into one."
            )
        self.has_received = True
        self.staged.attributes.receive()
        self.logs = self.fills is None
        return self._received_again()

    def _received_again(self) -> object:
        """Return a copy of what was received, which the step may change in place: the original is a leaf."""
        return map_tensors(torch.clone, self.received)

    def _stand_in(self, name: str, number: int) -> object:
        """Return what has the form of a part's output, and no values."""
        specs = self.shapes.get(name, [])
        if not specs:
            raise ModuleError(
                f"{name} was called after {self.partition.boundary(self.stage - 1)}, on stage {self.stage}, but is on "
                f"stage {self.staged.owners[name][0]}; register it after the blocks, or name it for the stages that "
                f"call it in {HOOK}(num_stages)."
            )
        if number >= len(specs):
            raise ModuleError(
                f"{name} was called {number + 1} times on stage {self.stage}, but {len(specs)} times on its own stage, "
                f"stage {self.staged.owners[name][0]}; a pipeline step runs through the blocks once, and in the same "
                "way for all batches of the same shapes: call the model once, and use its output twice."
            )
        value = float("nan") if self.fills is None else self.fills.get(name, 0.0)
        owner = self.staged.owners[name][0]

        def error_of(spec: Spec) -> ModuleError:
            return ModuleError(
                f"{name} on stage {owner} returns a tensor of {spec.dtype}, which the step uses on stage {self.stage}, "
                "which does not have it; let the blocks pass it on in their outputs, or compute it on the stage that "
                "needs it."
            )

        return stand_in(specs[number], value, self.staged.device, error_of)

    # --- calls in backward -------------------------------------------------------------------------------------------

    def call_again(
        self,
        name: str,
        part: nn.Module,
        run: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Answer a call of a part by a checkpoint around it, which computes in backward what it did not keep.

        It gets what it got in forward: the same random numbers, and the same output of the stage before.
        """
        owners, draws = self.staged.owners[name], self.staged.draws
        if self.stage in owners:
            with draws.of_part(self.index, name) if part.training else nullcontext():
                output = run(*args, **kwargs)
        elif owners[0] > self.stage:
            raise StopRecomputation
        elif name == self.partition.boundary(self.stage - 1):
            output = self._received_again()
        else:
            output = self._stand_in(name, 0)
        if name in self.staged.ends:
            draws.cross(self.index, self.staged.ends[name])
        return output

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_checkpoint(self, name: str) -> None:
        """Check that the graph of what crosses a cut is here, which a reentrant checkpoint makes after its forward."""
        if self._has_grad and not torch.is_grad_enabled() and _is_in_reentrant_checkpoint():
            raise ModuleError(
                f"{name} was called by torch.utils.checkpoint with use_reentrant=True, which hides the gradients of "
                "what passes between stages; set use_reentrant=False, or use Trainer(activation_checkpointing='full')."
            )

    def _check_order(self, name: str) -> None:
        own = [part for part in self.partition.stages[self.stage] if self.partition.parts[part].is_block]
        done = [part for part in self.calls if self.partition.parts[part].is_block]
        if len(self.staged.owners[name]) > 1:
            return
        expected = own[len(done)] if len(done) < len(own) else None
        if name in done:
            raise ModuleError(
                f"{name} was called twice in one step; a pipeline runs each block once. Use two blocks that share "
                "parameters, or leave out pp."
            )
        if name != expected:
            raise ModuleError(
                f"{name} was called before {expected}; a pipeline runs blocks in the order in which they are "
                "registered: register them in the order of their calls, or name the parts of each stage in order in "
                f"{HOOK}(num_stages)."
            )
        if not self.has_received:
            raise ModuleError(
                f"{name} of stage {self.stage} was called before {self.partition.boundary(self.stage - 1)} of stage "
                f"{self.stage - 1}; register the blocks in the order of their calls."
            )

    def _check_inputs(self, name: str, part: nn.Module, args: object, kwargs: object) -> None:
        """Look for NaN that was not received: such values come from parts of earlier stages."""
        if has_nan(self.received):
            return
        for place, leaf in named_leaves({"args": args, "kwargs": kwargs}):
            if has_nan(leaf):
                raise ModuleError(
                    f"{name} ({type(part).__name__}) on stage {self.stage} got NaN in {place}: a value that is not in "
                    f"the output of {self.partition.boundary(self.stage - 1)} crosses the cut, from one of "
                    f"{', '.join(dict.fromkeys(self.stood_in)) or 'the parts'} of earlier stages. Let the blocks pass "
                    f"it on in their outputs, or name its part for stage {self.stage}, too, in {HOOK}(num_stages)."
                )

    def check_complete(self, *, was_cut: bool) -> None:
        """Check that the step has called this stage's blocks, and has reached the next stage.

        Raises:
            ModuleError: naming what it has not called.
        """
        own = [part for part in self.partition.stages[self.stage] if self.partition.parts[part].is_block]
        missing = [name for name in own if name not in self.calls]
        if missing:
            raise ModuleError(
                f"{', '.join(missing[:3])} of stage {self.stage} was not called in the step; a pipeline step calls "
                "every block once: call it, or leave it out of the module."
            )
        if not was_cut and not self.is_last:
            raise ModuleError(
                f"The step must call {self.partition.stages[self.stage + 1][0]} of stage {self.stage + 1}, but it "
                f"ended on stage {self.stage}; call every block once, and return the loss."
            )

    def _out_of_order(self, name: str, owner: int) -> ModuleError:
        boundary = self.partition.boundary(self.stage)
        return ModuleError(
            f"{name}, which is on stage {owner}, was called before {boundary} on stage {self.stage}; name it for the "
            f"stage that calls it in {HOOK}(num_stages), or register it before the blocks."
        )

    def noted(self) -> dict[str, list[object]]:
        """Return what all parts up to here return, for the next stage."""
        return {**{name: list(specs) for name, specs in self.shapes.items()}, **self.specs}


class StagedModule:
    """Intercepts a module's calls of its parts, and runs those of this rank's stages.

    Args:
        module: the module; parameters that are on no stage of this rank are on the meta device.
        partition: the stages.
        own: the stages of this rank.
        device: this rank's device.
    """

    def __init__(self, module: nn.Module, partition: Partition, own: Sequence[int], device: torch.device) -> None:
        self.module, self.partition, self.own, self.device = module, partition, own, device
        self.owners = {name: partition.owners(name) for name in partition.parts}
        self.ends = {partition.boundary(stage): stage for stage in range(partition.num_stages - 1)}
        """The parts whose outputs pass from stage to stage, and the stages that they end."""
        self.draws = Draws(device)
        self.attributes = AbsentAttributes(module, partition, device)
        self.observed: Observed | None = None
        """Receives what steps return and log, where it is to be compared."""
        self.is_first_look = False
        """Whether inputs are searched for values that have passed a cut."""
        self._counted = CountedOnce(module)
        self._current: Answering | None = None
        self.again: Pass | None = None
        """The pass whose backward runs, for checkpoints around parts."""
        for name in partition.parts:
            self._step_in(name, module.get_submodule(name))

    def _step_in(self, name: str, part: nn.Module) -> None:
        """Let calls of a part come here first: before its hooks, and around what is compiled of it."""
        compiled = find_compiled_call(part) if set(self.owners[name]) & set(self.own) else None

        run: Callable[..., object] = partial(call_uncompiled, part) if compiled is None else compiled

        def call(*args: object, **kwargs: object) -> Any:
            if self._current is not None:
                return self._current.call(name, part, run, args, kwargs)
            if self.again is not None:
                return self.again.call_again(name, part, run, args, kwargs)
            return run(*args, **kwargs)

        set_compiled_call(part, call)

    @contextmanager
    def passing(self, stage: int, index: int, received: object, shapes: Shapes | None) -> Iterator[Pass]:
        """Run steps inside as one stage does; what it logs counts from where it receives to where it sends."""
        self._current = current = Pass(self, stage, index, received, shapes.parts if shapes is not None else {})
        self.draws.begin_micro_batch(index)
        current.logs = stage == 0
        if self.observed is not None:
            self._counted.observe = partial(self.observed.note, index, stage)
        try:
            with self._counted.where(lambda: current.logs), self.attributes.marked(stage):
                yield current
        finally:
            self._current, self._counted.observe = None, None

    @contextmanager
    def whole(self, current: Answering) -> Iterator[None]:
        """Run a step inside as a whole: its calls of parts are answered by `current`."""
        self._current = current
        self.draws.begin_micro_batch(current.index)
        try:
            yield
        finally:
            self._current = None

    def run(self, step: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run a step to the end of the stage; return what the stage sends or, on the last, what the step returns."""
        current = self._current
        if current is None:
            return step(*args, **kwargs)
        try:
            output = step(*args, **kwargs)
        except _Cut:
            current.check_complete(was_cut=True)
            return current.output
        current.check_complete(was_cut=False)
        if self.observed is not None:
            self.observed.keep(current.index, output)
        return output

    @property
    def is_passing(self) -> bool:
        """Whether a stage is running."""
        return self._current is not None


def has_nan(data: object) -> bool:
    """Return whether a tensor of a structure, or this rank's shard of it, has a NaN element.

    Those inside of a transformation of ``torch.func`` do not tell their values.
    """
    tensors = (tensor for tensor in iterate_tensors(data) if not is_wrapped(tensor))
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return any(bool(local_shard(tensor).isnan().any()) for tensor in numbers)


def _is_in_reentrant_checkpoint() -> bool:
    frame: Any = find_frame(0)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
