"""Savings in recomputation: activations that are computed again although there is memory to keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Final

import torch
from torch import Tensor, nn

from ...strategies.state.dtensor import is_dtensor, local_shard
from ...strategies.torch_internals.operators import TorchDispatchMode
from .stopwatch import Stopwatch
from .watch import Saving, SavingWatch, Subject, TypicalStep

_TIMED: Final = 4
"""Forwards of a block that are timed, before one is measured in bytes."""
_ROOM: Final = 0.5
"""Share of the free memory that the activations may need."""


class Recomputing(SavingWatch):
    """Times the forward of a recomputed block, and counts the bytes of its results: what it keeps is less."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._clock = Stopwatch(subject.device)
        self._results: _Results | None = None
        self._counting = ExitStack()
        self._num_blocks = 0
        self._is_inside = False

    def begin(self) -> None:
        setting = self.subject.recomputes
        if (
            setting is None
            or setting.mode != "full"
            or setting.offload
            or self.subject.compiles
            or self.subject.has_stages
        ):
            return
        blocks = setting.submodules(self.subject.module)
        self._num_blocks, block = len(blocks), blocks[0][1]
        self._handles = [
            block.register_forward_pre_hook(self._before),
            block.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, block: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled() or self._is_inside:
            return
        self._is_inside = True
        if self._clock.num_times < _TIMED:
            self._clock.start()
        elif self._results is None:
            self._results = _Results()
            self._counting.enter_context(self._results)

    def _after(self, block: nn.Module, args: object, output: object) -> None:
        if not self._is_inside:
            return
        self._is_inside = False
        self._clock.stop()
        if self._results is not None:
            self._counting.close()
            self.end()

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        if self._results is None or not self._clock.num_times:
            return
        number = self._num_blocks * self.subject.run.accumulate_grad_batches
        share = number * self._clock.typical() / times.step
        needed, memory = self._num_blocks * self._results.num_bytes, self.subject.held_and_free()
        if memory is None or needed > _ROOM * memory[1]:
            return
        free = memory[1]
        yield Saving(
            "recomputation",
            share,
            f"{share:.0%} of each step computes {self._num_blocks} blocks again, to save at most {needed / 1e9:.2g} GB,"
            f" and {free / 1e9:.3g} GB are free: without activation_checkpointing a step is {share:.0%} shorter.",
        )


class _Results(TorchDispatchMode):
    """Counts the bytes of all results of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else [result]:
            if isinstance(one, Tensor):
                local = local_shard(one) if is_dtensor(one) else one
                self.num_bytes += local.numel() * local.element_size()
        return result
