"""WindowRunner: the micro-batches of a step, forward and backward through the stages of this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..distributed.nested import iterate_tensors
from ..module.traces import Traceless
from ..module.untouched import steps_of
from ..torch_internals.pipelining import add_weight_gradients, compute_input_gradients
from .schedule import Action, Schedule, without_halves
from .spec import KnownShapes, Shapes, flatten_specs, specs_of, with_tensors
from .stages import Pass, StagedModule, has_nan
from .timeline import WindowRecorder
from .wire import StageWire, tag_of
from .work import StepContext, WindowWork, signatures_of

Place = tuple[int, int]
"""A stage and the index of a micro-batch."""


class WindowRunner:
    """Runs windows of micro-batches under a schedule, and single batches without gradients.

    The shapes of what passes between stages are sent with the first batch of each signature. Collective: every rank of
    the pipeline creates one.

    Args:
        staged: the module, on the stages of this rank.
        schedule: the order of the actions.
        rank: the place of this rank in the pipeline.
        wire: to the other ranks of the pipeline.
        around: what surrounds the steps.
    """

    def __init__(
        self, staged: StagedModule, schedule: Schedule, rank: int, wire: StageWire, around: StepContext
    ) -> None:
        self._staged, self._schedule, self._rank, self._wire = staged, schedule, rank, wire
        self._around = around
        self._num_stages = schedule.num_stages
        self.known = KnownShapes()
        self.recorder: WindowRecorder | None = None
        """The recorder of the next window."""
        self._forget()

    def _forget(self) -> None:
        self._recording: WindowRecorder | None = None
        self._shapes: list[dict[int, Shapes]] = []
        self._is_new: list[bool] = []
        self._arriving: dict[Place, tuple[list[Tensor], list[object]]] = {}
        self._arriving_gradients: dict[Place, tuple[list[Tensor], list[object]]] = {}
        self._handed: dict[Place, Any] = {}
        self._inputs: dict[Place, list[Tensor]] = {}
        self._outputs: dict[Place, list[Tensor]] = {}
        self._notes: dict[Place, object] = {}
        self._rests: dict[Place, object] = {}
        self._passes: dict[Place, Pass] = {}
        self._backwards_left: list[int] = []
        self._staged.again = None

    # --- a window ----------------------------------------------------------------------------------------------------

    def run(self, work: WindowWork) -> None:
        """Add the gradients of all micro-batches. Collective: every rank of the pipeline calls it."""
        signatures = signatures_of(work, self._around)
        number = len(signatures)
        if self._wire.is_fake:
            self._imagine(work)
        self._begin(signatures, work.position)
        is_simple = any(self._is_new)
        if self._around.sends:
            is_simple = self._around.is_true_on_any(is_simple)
            self._is_new = [is_simple] * number
        actions = self._schedule.actions(self._rank, number, is_simple=is_simple)
        if not work.splits_backward:
            actions = without_halves(actions)
        do: dict[str, Callable[[Action, WindowWork], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights,
            "SEND_F": self._send, "RECV_F": self._receive, "SEND_B": self._send_gradients,
            "RECV_B": self._receive_gradients,
        }  # fmt: skip
        if self.recorder is not None:
            self._recording, self.recorder = self.recorder, None
            self._recording.begin(number, is_simple=is_simple)
            do = self._recording.around(do)
        for action in actions:
            self._staged.again = self._passes.get(action[1:])
            try:
                do[action.kind](action, work)
                if action.kind in ("B", "W"):
                    self._end_backward(action, work)
            except Exception as error:
                error.add_note(self._where(action))
                raise
        self._end(len(work.signatures))

    def _begin(self, signatures: Sequence[Hashable], position: int) -> None:
        self._forget()
        self._shapes = [self.known.of(signature) for signature in signatures]
        # a signature is new for all its micro-batches of a window: on each stage the first one comes at another time
        self._is_new = [not shapes for shapes in self._shapes]
        self._backwards_left = [len(self._schedule.stages_of(self._rank))] * len(signatures)
        self._staged.draws.begin(position)

    def _imagine(self, work: WindowWork) -> None:
        """Work out what earlier stages, on ranks that do not exist, would send: run them here, without gradients."""
        for index, signature in enumerate(work.signatures):
            known = self.known.of(signature)
            if known:
                continue
            value, shapes = None, Shapes(None, {})
            self._staged.draws.begin(work.position)
            for stage in range(self._schedule.stages_of(self._rank)[-1] + 1):
                known[stage] = shapes
                if stage == self._num_stages - 1:
                    break
                with torch.no_grad(), self._staged.passing(stage, 0, value, shapes) as current:
                    value = work.forward_at(index)
                shapes = Shapes(specs_of(value), current.noted())
                for spec in (spec for specs in (shapes.received, shapes.parts) for spec in flatten_specs(specs)):
                    spec.requires_grad = spec.dtype.is_floating_point

    def _end(self, number: int) -> None:
        self._wire.finish()
        self._staged.draws.end(number)
        self._forget()

    def _where(self, action: Action) -> str:
        names = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
        doing = names.get(action.kind, "a transfer")
        return (
            f"In the {doing} of micro-batch {action.micro_batch} on stage {action.stage} of {self._num_stages}, on "
            f"rank {self._rank} of the pipeline."
        )

    # --- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        with nullcontext() if index < len(work.signatures) else work.unseen():
            received, current, output = self._pass(stage, index, lambda: work.forward_at(index))
        self._passes[stage, index], current.output = current, None
        if current.is_last:
            loss = work.loss_at(index, output)
            self._outputs[stage, index] = [loss]
        else:
            self._outputs[stage, index] = list(iterate_tensors(output))
        self._inputs[stage, index] = [leaf for leaf in received if leaf.requires_grad]

    def _pass(self, stage: int, index: int, step: Callable[[], object]) -> tuple[list[Tensor], Pass, object]:
        """Run a stage on a micro-batch, and hand what it sends to the next one, if that is on this rank."""
        leaves, value, shapes = self._take(stage, index)
        self._staged.is_first_look = self._is_new[index]
        with self._staged.passing(stage, index, value, shapes) as current:
            output = step()
        looks = current.is_last and stage > 0 and self._is_new[index]
        looks = looks and (torch.is_grad_enabled() or self._around.evaluates_alone)
        # on all of them: to trace it is to run the step again
        if looks and self._around.is_true_on_any(has_nan(output) and not has_nan(value)):
            self._trace(current, value, shapes, step)
        if not current.is_last:
            self._note(stage, index, current, output)
        return leaves, current, output

    def _trace(self, failed: Pass, value: object, shapes: Shapes | None, step: Callable[[], object]) -> None:
        """Find the parts of earlier stages whose outputs, which are missing here, turn the step's result into NaN.

        Raises:
            ModuleError: naming them, if there are any.
        """
        module = self._staged.module

        def makes_nan(fills: Mapping[str, float]) -> bool:
            again = self._staged.passing(failed.stage, failed.index, value, shapes)
            with Traceless(module, steps_of(module)), again as current:
                current.fills = fills
                return has_nan(step())

        is_nan_anyway = makes_nan({})
        guilty = [
            name
            for name in dict.fromkeys(failed.stood_in)
            if self._around.is_true_on_any(makes_nan({name: math.nan}) and not is_nan_anyway)
        ]
        if guilty:
            boundary = failed.partition.boundary(failed.stage - 1)
            raise ModuleError(
                f"The step must compute the loss from the output of {boundary} on stage {failed.stage}, got NaN from "
                f"what {' and '.join(guilty)} of earlier stages returned: a value that is not in this output crosses "
                f"the cut. Let the blocks pass it on in their outputs, or name its part for stage {failed.stage}, too, "
                "in configure_pipeline(num_stages)."
            )

    def _take(self, stage: int, index: int) -> tuple[list[Tensor], Any, Shapes | None]:
        """Return what a stage has received: leaves of the graph, the structure that the step sees, and the shapes."""
        if stage == 0:
            self._shapes[index].setdefault(0, Shapes(None, {}))
            return [], None, None
        if (stage, index) in self._handed:
            tensors, shapes = self._handed.pop((stage, index))
            self._shapes[index][stage] = shapes
        else:
            if (stage, index) not in self._arriving:
                self._post(stage, index)
            tensors, works = self._arriving.pop((stage, index))
            self._wait(works, "F", stage, index)
            shapes = self._shapes[index][stage]
        specs = flatten_specs(shapes.received)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.requires_grad_(spec.requires_grad and torch.is_grad_enabled())
        return tensors, with_tensors(shapes.received, tensors), shapes

    def _note(self, stage: int, index: int, current: Pass, output: object) -> None:
        """Compare what is sent with what the next stage expects, or tell it."""
        shapes = Shapes(specs_of(output), current.noted())
        sent = self._shapes[index].get(-1 - stage)
        if sent is None:
            self._shapes[index][-1 - stage] = shapes
        elif list(map(str, flatten_specs(sent.received))) != list(map(str, flatten_specs(shapes.received))):
            boundary = current.partition.boundary(stage)
            raise ModuleError(
                f"{boundary}, the last part of stage {stage}, returned "
                f"{', '.join(map(str, flatten_specs(shapes.received)))}, and "
                f"{', '.join(map(str, flatten_specs(sent.received)))} for another batch of the same shapes; the shapes "
                "of what passes between stages must depend only on the shapes of the batch."
            )
        following = stage + 1
        if self._schedule.rank_of(following) == self._rank:
            tensors = [tensor.detach() for tensor in iterate_tensors(output)]
            self._handed[following, index] = tensors, shapes
        elif self._is_new[index]:
            self._notes[stage, index] = shapes

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _send(self, action: Action, work: WindowWork | None) -> None:
        _, stage, index = action
        rank = self._schedule.rank_of(stage + 1)
        if self._is_new[index]:
            self._wire.send_object(self._notes.pop((stage, index)), rank)
        self._wire.send(self._outputs[stage, index], rank, tag_of(index, stage, is_backward=False))

    def _receive(self, action: Action, work: WindowWork | None) -> None:
        if not self._is_new[action.micro_batch]:  # else the shapes come first, and it is received where it is used
            self._post(action.stage, action.micro_batch)

    def _post(self, stage: int, index: int) -> None:
        rank, known = self._schedule.rank_of(stage - 1), self._shapes[index]
        if self._is_new[index]:
            recording = self._recording
            with nullcontext() if recording is None else recording.waiting("F", stage, index):
                known[stage] = self._wire.receive_object(rank)
        tensors = [spec.empty(self._staged.device) for spec in flatten_specs(known[stage].received)]
        tag = tag_of(index, stage - 1, is_backward=False)
        self._arriving[stage, index] = tensors, self._wire.receive(tensors, rank, tag)

    def _send_gradients(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        rank, tag = self._schedule.rank_of(stage - 1), tag_of(index, stage, is_backward=True)
        self._wire.send(self._gradients_of_inputs(stage, index), rank, tag)

    def _receive_gradients(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        tensors = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self._sent(stage, index)
        ]
        rank, tag = self._schedule.rank_of(stage + 1), tag_of(index, stage + 1, is_backward=True)
        self._arriving_gradients[stage, index] = tensors, self._wire.receive(tensors, rank, tag)

    def _sent(self, stage: int, index: int) -> list[Tensor]:
        """Return the outputs of a stage that have gradients."""
        return [tensor for tensor in self._outputs[stage, index] if tensor.requires_grad]

    def _gradients_of_inputs(self, stage: int, index: int) -> list[Tensor]:
        leaves = self._inputs.pop((stage, index))
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _gradients_of_outputs(self, stage: int, index: int) -> list[Tensor]:
        if self._schedule.rank_of(stage + 1) == self._rank:
            return self._gradients_of_inputs(stage + 1, index)
        tensors, works = self._arriving_gradients.pop((stage, index))
        self._wait(works, "B", stage, index)
        return tensors

    def _wait(self, works: Sequence[Any], kind: str, stage: int, index: int) -> None:
        recording = self._recording
        with nullcontext() if recording is None else recording.waiting(kind, stage, index):
            for work in works:
                work.wait()

    # --- backward ----------------------------------------------------------------------------------------------------

    def _end_backward(self, action: Action, work: WindowWork) -> None:
        """Say that a micro-batch has gone backward through all stages of this rank, after the last one."""
        del self._passes[action.stage, action.micro_batch]
        self._backwards_left[action.micro_batch] -= 1
        if not self._backwards_left[action.micro_batch]:
            work.after_backward(action.micro_batch)

    def _backward(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        if stage == self._num_stages - 1:
            with self._around.recomputing(index):
                work.backward_of(index, self._outputs.pop((stage, index))[0])
            return
        outputs = self._sent(stage, index)
        gradients = self._gradients_of_outputs(stage, index)
        del self._outputs[stage, index]
        if outputs:
            with self._around.recomputing(index):
                torch.autograd.backward(outputs, gradients)

    def _backward_inputs(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        if stage == self._num_stages - 1:
            outputs, gradients = [work.scaled(index, self._outputs.pop((stage, index))[0])], None
        else:
            outputs, gradients = self._sent(stage, index), self._gradients_of_outputs(stage, index)
            del self._outputs[stage, index]
        inputs = self._inputs[stage, index]
        if inputs and outputs:
            with self._around.recomputing(index):
                self._rests[stage, index] = compute_input_gradients(outputs, gradients, inputs, self._weights())
        else:  # nothing to send on: everything is computed with the weights
            self._rests[stage, index] = None, outputs, gradients

    def _backward_weights(self, action: Action, work: WindowWork) -> None:
        _, stage, index = action
        rest = self._rests.pop((stage, index))
        with self._around.recomputing(index):
            if not isinstance(rest, tuple):
                add_weight_gradients(self._weights(), rest)
            elif rest[1]:
                torch.autograd.backward(rest[1], rest[2])

    def _weights(self) -> list[nn.Parameter]:
        return [p for p in self._staged.module.parameters() if p.requires_grad and not p.is_meta]

    # --- without gradients -------------------------------------------------------------------------------------------

    def evaluate(self, signature: Hashable, step: Callable[[], object]) -> object:
        """Run a step once through all stages; return its result on the rank that ends it, elsewhere None.

        Collective: every rank of the pipeline calls it.
        """
        self._begin([signature], 0)
        result = None
        for stage in self._schedule.stages_of(self._rank):
            try:
                _, current, output = self._pass(stage, 0, step)
            except Exception as error:
                error.add_note(self._where(Action("F", stage, 0)))
                raise
            if current.is_last:
                result = output
            elif self._schedule.rank_of(stage + 1) != self._rank:
                self._outputs[stage, 0] = list(iterate_tensors(output))
                self._send(Action("SEND_F", stage, 0), None)
        self._end(1)
        return result
