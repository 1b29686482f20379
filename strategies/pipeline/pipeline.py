"""Pipeline: a module cut to the stages of one rank, with the parameters that its ranks share or that are elsewhere."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...common.errors import EchelonError
from ..distributed.collectives import Collectives
from ..state.dtensor import is_dtensor, local_shard, with_local_shard
from .first_steps import FirstSteps
from .partition import Partition, check_is_cut, make_partition, stages_of_parameters
from .schedule import Schedule
from .stages import StagedModule
from .timeline import WindowRecorder
from .window import WindowRunner
from .wire import StageWire
from .work import StepContext, WindowWork


class Pipeline:
    """The stages of a module on this rank. Collective: every rank of the pipeline creates one.

    Parameters of other ranks' stages stay in the module, on the meta device, so that it keeps their names.

    Args:
        module: the module, whole on each rank.
        schedule: which rank has which stages, and in which order they run.
        collectives: of the ranks of this pipeline.
        device: this rank's device.
    """

    def __init__(self, module: nn.Module, schedule: Schedule, collectives: Collectives, device: torch.device) -> None:
        self.module, self.schedule, self.collectives = module, schedule, collectives
        self.rank = collectives.rank
        self.partition: Partition = make_partition(module, schedule.num_stages)
        check_is_cut(module, self.partition)
        holders = stages_of_parameters(module, self.partition)
        named = list(module.named_parameters(remove_duplicate=False))
        self.ranks_of: Mapping[str, Sequence[int]] = {
            name: sorted({schedule.rank_of(stage) for stage in holders[parameter]}) for name, parameter in named
        }
        """The ranks of the pipeline that hold each parameter, under each of its names."""
        self.elsewhere = self._leave_to_others(holders)
        """The parameters that this rank does not hold."""
        self._device = device
        self._staged: StagedModule | None = None
        self._runner: WindowRunner | None = None
        self._trained: list[bool] = []
        self._first_steps: FirstSteps | None = None
        self.around = StepContext()
        """What surrounds the steps, once `start` was called."""

    def _leave_to_others(self, holders: Mapping[Tensor, Sequence[int]]) -> set[nn.Parameter]:
        """Replace the parameters of other ranks' stages by ones without memory, and return the latter."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for submodule in list(self.module.modules()):
            for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
                if self.rank in {self.schedule.rank_of(stage) for stage in holders[parameter]}:
                    continue
                if parameter not in replaced:
                    # a rehearsal, in which no tensor has memory, runs earlier stages to see what they would send
                    device = None if self.collectives.is_fake else "meta"
                    empty = torch.empty_like(parameter, device=device)
                    replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(submodule, name, replaced[parameter])
        return set(replaced.values())

    def is_here(self, name: str) -> bool:
        """Return whether a submodule is in a part of this rank, or in no part."""
        parts = [part for part in self.partition.parts if f"{name}.".startswith(f"{part}.")]
        return all(self.rank in map(self.schedule.rank_of, self.partition.owners(part)) for part in parts)

    @property
    def ends(self) -> list[str]:
        """The parts whose outputs this rank sends on or hands to another of its stages."""
        return [self.partition.boundary(stage) for stage in self.schedule.stages_of(self.rank)]

    def start(self, around: StepContext) -> None:
        """Intercept the module's calls of its parts, once these are in their final form."""
        stages, self.around = self.schedule.stages_of(self.rank), around
        self._staged = staged = StagedModule(self.module, self.partition, stages, self._device)
        self._runner = WindowRunner(staged, self.schedule, self.rank, StageWire(self.collectives), around)
        self._first_steps = FirstSteps(staged, self.schedule, self.collectives, around)

    @property
    def staged(self) -> StagedModule:
        """The object that runs a stage, once `start` was called."""
        assert self._staged is not None
        return self._staged

    @property
    def runner(self) -> WindowRunner:
        """The object that runs the micro-batches, once `start` was called."""
        assert self._runner is not None
        return self._runner

    @property
    def first_steps(self) -> FirstSteps:
        """The object that compares the first micro-batches, once `start` was called."""
        assert self._first_steps is not None
        return self._first_steps

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage, and so the loss."""
        return self.schedule.rank_of(self.schedule.num_stages - 1)

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let stages tell each other anew what has gradients, if other parameters are trained than in the last window.

        Args:
            parameters: all those of the module, as they are between steps.
        """
        trained = [parameter.requires_grad for parameter in parameters]
        if trained != self._trained:
            self._trained = trained
            self.runner.known.clear()

    def run_window(self, work: WindowWork) -> None:
        """Add the gradients of a window. Collective: every rank of the pipeline calls it."""
        self.runner.run(work)

    def record_window(self) -> WindowRecorder:
        """Return the recorder of the next window."""
        self.runner.recorder = recorder = WindowRecorder(self.schedule, self.collectives, self._device)
        return recorder

    def evaluate(self, signature: Hashable, step: Callable[[], object]) -> object:
        """Run a step without gradients, and return its result on all ranks. Collective."""
        return self.collectives.broadcast(self.evaluate_here(signature, step), self.last_rank)

    def evaluate_here(self, signature: Hashable, step: Callable[[], object]) -> object:
        """Run a step without gradients, and return its result on the rank that ends it, elsewhere None. Collective.

        The signature tells apart steps that pass on tensors of different shapes.
        """
        return self.runner.evaluate(signature, step)

    def annotate(self, error: BaseException) -> None:
        """Add a note to errors of torch and of the module's hooks that say nothing of stages."""
        text = str(error) if isinstance(error, RuntimeError) else ""
        if re.search(r"\bmeta\b", text):
            error.add_note(
                "A parameter of another stage has no values here: it was used outside its part, or its part was not "
                "run by calling it. Call the part, or name it for this stage, too, in configure_pipeline(num_stages)."
            )
        if self.schedule.splits_backward and ("stage backward input" in text or "backward an extra time" in text):
            error.add_note(
                f"schedule={self.schedule.name!r} computes backward in two halves, which does not work with code that "
                "the module compiles itself or with its own selective checkpoints; use Trainer(compile=True) or "
                "activation_checkpointing=, or schedule='1f1b'."
            )
        hook = None if isinstance(error, EchelonError) or self.rank == self.last_rank else _ending_hook(error)
        if hook is not None:
            error.add_note(
                f"{hook} ran on a rank whose stages do not reach the loss: what a step appends to a list after its "
                "last block exists on the last stage only, and is missing here. Return early from the hook unless "
                "self.trainer.strategy.has_loss; or collect what the step returns in on_validation_batch_end, which "
                "gets it on every rank (on_train_batch_end: only the loss)."
            )

    # --- parameters on several ranks ---------------------------------------------------------------------------------

    def shared(self) -> list[tuple[str, nn.Parameter, Sequence[int]]]:
        """Return the parameters of this rank that others hold as well, with their ranks."""
        return [
            (name, parameter, self.ranks_of[name])
            for name, parameter in self.module.named_parameters()
            if len(self.ranks_of[name]) > 1 and self.rank in self.ranks_of[name]
        ]

    def add_shared_gradients(self) -> None:
        """Add up the gradients of parameters that several ranks hold. Collective: the pipeline's ranks."""
        for _, parameter, ranks in self.shared():
            own = None if parameter.grad is None else local_shard(parameter.grad)
            if self.rank == ranks[0]:
                parts = [own, *(self.collectives.recv(rank) for rank in ranks[1:])]
                present = [part for part in parts if part is not None]
                total = torch.stack(present).sum(0) if len(present) > 1 else present[0] if present else None
                for rank in ranks[1:]:
                    self.collectives.send(total, rank)
            else:
                self.collectives.send(own, ranks[0])
                total = self.collectives.recv(ranks[0])
            if total is not None:
                parameter.grad = with_local_shard(parameter, total.to(self._grad_device(parameter)))

    def _grad_device(self, parameter: nn.Parameter) -> torch.device:
        return local_shard(parameter).device if is_dtensor(parameter) else parameter.device

    def copies_of(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Return how many ranks of the pipeline hold each of these parameters."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [len(self.ranks_of[names[parameter]]) if parameter in names else 1 for parameter in parameters]

    def owns(self, name: str) -> bool:
        """Return whether this rank is the first to hold a parameter, and so the one that writes it."""
        return self.ranks_of[name][0] == self.rank

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        """Set copies of buffers, by name, to their values on the stage of their part.

        Collective: the pipeline's ranks.
        """
        for part in self.partition.parts:
            owner = self.schedule.rank_of(self.partition.owners(part)[-1])
            buffers = [buffer for name, buffer in copies.items() if name.startswith(f"{part}.")]
            if buffers:
                values = self.collectives.broadcast([buffer.detach() for buffer in buffers], owner)
                with torch.no_grad():
                    for buffer, value in zip(buffers, values, strict=True):
                        buffer.copy_(value)


def _ending_hook(error: BaseException) -> str | None:
    """Return the hook at the end of a batch, an epoch or a stage in which an error was raised."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((name for name in names if re.fullmatch(r"on_\w+_end", name)), None)
