"""PlacedStages: parts of a module that is divided into the stages of a pipeline, of which this rank has some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..context_parallel.cut_steps import CutSteps
from ..distributed.collectives import Collectives
from ..parallel.equal_ranks import make_equal
from ..parallel.mesh import in_stage
from ..parallel.optimizer_probe import OptimizerProbe, check_can_be_dealt
from ..pipeline.checks import check_module, check_number
from ..pipeline.partition import find_parts
from ..pipeline.pipeline import Pipeline
from ..pipeline.schedule import Schedule
from ..pipeline.spec import signature_of
from ..pipeline.state import (
    add_placeholders,
    gather_all,
    keep_own_entries,
    own_entries,
    whole_of_stages,
    without_elsewhere,
)
from ..pipeline.timeline import WindowRecorder
from ..pipeline.work import StepContext, WindowWork, signatures_of
from ..state.dtensor import is_dtensor
from ..state.tied_names import as_tied
from ..tensor_parallel.tensor_plan import TensorPlan
from .cuts import Cuts
from .placed import Site
from .shards import PlacedShards, Sharding


class PlacedStages(PlacedShards):
    """The stages of a module that this rank has; their layers may be cut, and their parameters are sharded.

    Args:
        site: where it lies.
        module: the whole module, as ``configure_model`` has built it.
        sharding: how its parameters are sharded.
        cuts: what else is cut.
        schedule: the order in which stages work.
    """

    def __init__(self, site: Site, module: nn.Module, sharding: Sharding, cuts: Cuts, schedule: Schedule) -> None:
        self._schedule, self._has_run = schedule, False
        self._lengths: list[Sequence[int]] = []
        """Of the sequences in each micro-batch of the window, where they are cut."""
        super().__init__(site, module, sharding, cuts)

    def begin_run(self, site: Site, sequences: CutSteps | None, *, is_manual: bool) -> None:
        super().begin_run(site, sequences, is_manual=is_manual)
        self.pipeline.first_steps.begin()
        self._has_run = False

    def _check_optimizer(self, probe: OptimizerProbe) -> bool:
        check_can_be_dealt(probe, self.site.name, self.ranks.all)  # each stage has parameters of its own
        return super()._check_optimizer(probe)

    def annotate(self, error: BaseException) -> None:
        if "not have been used in the graph" in str(error):
            error.add_note(
                "A pipeline stage has only its own part of a step's graph, so a step cannot compute a derivative "
                "(torch.autograd.grad) through several stages; use dp_shard and tp instead of pp."
            )
        self.pipeline.annotate(error)
        super().annotate(error)

    # --- the cut -----------------------------------------------------------------------------------------------------

    def _cut(self, sharding: Sharding) -> None:
        module, deferred = self.module, sharding.deferred
        check_module(module, self._schedule, is_built=True)
        for part in (*(module.get_submodule(name) for name in find_parts(module)), module):
            # on the CPU, as other ranks will hold most of it
            make_equal(chain(part.parameters(), part.buffers()), torch.device("cpu"), self.ranks.all)
        deferred.generator = self.ranks.all.broadcast(deferred.generator).cpu()
        pipeline = self.pipeline = Pipeline(module, self._schedule, self.ranks.stage, self.device)
        mesh = sharding.mesh[in_stage("tp")] if self._cuts.degrees.tp > 1 else None
        here = partial(TensorPlan.of_layers, is_chosen=pipeline.is_here, ends=pipeline.ends)
        self._cuts.cut_layers(module, mesh, self.device, self.ranks.peers, here)

    def _elsewhere(self) -> Collection[nn.Parameter]:
        return self.pipeline.elsewhere

    def _sharing(self) -> tuple[Collectives, Callable[..., object] | None]:
        pipeline = self.pipeline
        pipeline.start(self._around_stages())
        return self.ranks.peers, pipeline.staged.run

    def _around_stages(self) -> StepContext:
        around = StepContext(
            evaluates_alone=self._cuts.degrees.dp_shard == 1,  # otherwise each evaluation gathers from data ranks
            has_cut_layers=self._cuts.degrees.tp > 1,
            comparing=self._comparing,
        )
        sequences, ranks = self._cuts.sequences, self._cuts.sequence_ranks
        if sequences is not None and ranks is not None:
            around = around._replace(
                recomputing=lambda index: sequences.context.recomputing(self._lengths[index]),
                is_true_on_any=_any_of(ranks),
                together=sequences.collectives,
            )
        if self._cuts.has_dealt_experts:
            around = around._replace(
                sends=True, is_true_on_any=_any_of(self.ranks.peers), together=self.ranks.all, lent=self._cuts.lent
            )
        return around

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """Surround runs of whole steps, which leave no trace, and in which one rank alone may fail."""
        sequences = self._cuts.sequences
        with self._sharded.runs.writes.ignored(), nullcontext() if sequences is None else sequences.alone():
            yield

    # --- steps -------------------------------------------------------------------------------------------------------

    def _run(self, step_name: str, *args: object) -> object:
        pipeline, step = self.pipeline, partial(self._cuts.run, self.module, self._run_step, step_name, *args)
        if pipeline.staged.is_passing:
            return step()
        self._compare_sequences(step_name, args)
        signature = signature_of(step_name, args[0] if args else None)
        with self._compared([signature], 0, lambda _: step(), lambda: args):
            return pipeline.evaluate(signature, step)

    def _run_to_compare(self, step_name: str, *args: object) -> object:
        step, signature = partial(self._run_step, step_name, *args), signature_of(f"{step_name} to compare", args[0])
        if self._cuts.sequences is not None:  # a part may have the shape that another batch has on this rank alone
            signature = (signature, self._cuts.sequences.context.signature)
        with self._sharded.runs.writes.ignored():
            return self.pipeline.evaluate_here(signature, step)

    def run_window(self, work: WindowWork) -> None:
        signatures = signatures_of(work, self.pipeline.around)
        arguments = partial(_window_arguments, work, len(signatures))
        if not self._has_run:
            check_number(self._schedule, work.micro_batches_a_step)
        if self._cuts.sequences is not None:
            steps = arguments()
            self._compare_sequences("training_step", *steps)
            self._lengths = [self._cuts.sequences.context.lengths(args[0], self.module) for args in steps]
        self._scale_nothing()  # on stages without a loss
        self.pipeline.note_trained(self._sharded.parameters)
        with self._compared(signatures, work.position, work.forward_at, arguments):
            self._sharded.begin_window()
            self._gradient_hooks.link()
            self.pipeline.run_window(work)
        self._sharded.end_window()
        if not self._has_run:
            self._has_run = True
            self._sharded.check_all_sharded()
        self.pipeline.add_shared_gradients()

    def _compared(self, *steps: Any) -> AbstractContextManager[None]:
        """Compare steps through stages with whole ones, see `FirstSteps`, unless other ranks cannot take part now."""
        return nullcontext() if self._sharded.runs.has_idle else self.pipeline.first_steps.compared(*steps)

    def record_window(self) -> WindowRecorder:
        return self.pipeline.record_window()

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        has_run = False

        def run_lent(lent: object) -> None:
            nonlocal has_run
            run(lent)
            has_run = True

        super().stand_by(step_name, busy, run_lent)
        if step_name == "training_step" and not has_run:
            self.pipeline.add_shared_gradients()

    def _copies_of(self, parameters: Sequence[Any]) -> Sequence[int] | None:
        return self.pipeline.copies_of(parameters)

    # --- state -------------------------------------------------------------------------------------------------------

    def _ranks_of(self, name: str, parameter: Tensor) -> Sequence[int]:
        places = self.pipeline.ranks_of.get(name, [self.pipeline.rank])
        ranks = super()._ranks_of(name, parameter)
        return sorted({self._cuts.degrees.along(rank, ("pp",))[place] for rank in ranks for place in places})

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        super().sync_buffers(copies)
        self.pipeline.sync_buffers(copies)

    def model_state(self) -> dict[str, object]:
        return add_placeholders(self.pipeline, super().model_state())

    def full_model_state(self) -> dict[str, object]:
        self._sharded.reshard()
        state = gather_all(self.pipeline, self.ranks.all, is_kept=self._is_first_of_node())
        return as_tied(self.module, state)

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        self._sharded.reshard()
        return whole_of_stages(self.pipeline, {name: p.grad if gradients else p for name, p in named.items()})

    @property
    def _is_whole_step(self) -> bool:
        return super()._is_whole_step and not self.pipeline.staged.is_passing

    def _whole_parameter(self, name: str, shard: Tensor) -> Tensor:
        return whole_of_stages(self.pipeline, {name: shard})[name].to(self.device)

    def _copied_buffers(self, part: nn.Module) -> dict[Tensor, Tensor]:
        found = super()._copied_buffers(part)
        names = {name: b for name, b in self.module.named_buffers() if b in found and not is_dtensor(b)}
        self.sync_buffers({name: found[b] for name, b in names.items()})
        return found

    def load_model_state(self, state: Mapping[str, object], *, strict: bool = True) -> None:
        super().load_model_state(without_elsewhere(self.pipeline, state), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return own_entries(self.pipeline, super().optimizer_state(optimizer), self.ranks.peers)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_optimizer_state(optimizer, {**state, "state": keep_own_entries(self.pipeline, state["state"])})


def _any_of(ranks: Collectives) -> Callable[[bool], bool]:
    begin = ranks.begin_all_reduce  # a rehearsal answers this one itself
    return lambda flag: bool(begin([float(flag)], "max")()[0])


def _window_arguments(work: WindowWork, number: int) -> list[Sequence[object]]:
    return [work.arguments_at(index) for index in range(number)]
