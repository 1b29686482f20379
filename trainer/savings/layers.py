"""Savings in matrix products: float32 where a device has a faster dtype, and micro-batches of too few rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...strategies.devices.kinds import CPU
from ...strategies.state.dtensor import is_dtensor, local_shard
from ...strategies.torch_internals.modules import BatchNorm
from .stopwatch import times_of
from .watch import Saving, SavingWatch, Subject, TypicalStep

_SHAPES: Final = 3
"""Shapes that are tried, those with the most work first."""
_WORK: Final = {CPU: 1 << 30}
"""Multiplications of a product that is tried on a CPU; of larger ones, fewer rows are."""
_WORK_OF_ACCELERATORS: Final = 1 << 38
_LARGEST: Final = 1 << 26
"""Elements of a weight beyond which a layer is not tried, as that needs memory."""
_FEW_ROWS: Final = {CPU: 128}
"""Rows for which the time of a product may be that of reading its weight; with more, multiplying takes longer."""
_FEW_ROWS_OF_ACCELERATORS: Final = 1024


class Product(NamedTuple):
    """A matrix product of a linear layer."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype

    @property
    def work(self) -> int:
        """The multiplications."""
        return self.rows * self.inputs * self.outputs


class Layers(SavingWatch):
    """Notes the products of linear layers in the first step, and tries other forms of them."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._counts: Counter[Product] = Counter()

    def begin(self) -> None:
        if self.subject.compiles:
            return  # hooks would have the module compiled again
        layers = [part for part in self.subject.module.modules() if type(part) is nn.Linear]
        self._handles = [layer.register_forward_pre_hook(self._note) for layer in layers]

    def _note(self, layer: nn.Linear, args: tuple[object, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or not torch.is_grad_enabled():
            return
        given, weight = (local_shard(one) if is_dtensor(one) else one for one in (args[0], layer.weight))
        kind = given.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        if weight.ndim == 2 and given.shape[-1]:
            outputs, inputs = weight.shape
            self._counts[Product(given.numel() // given.shape[-1], inputs, outputs, dtype)] += 1

    def end_step(self) -> None:
        self.end()

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        yield from self._of_precision(times)
        yield from self._of_rows(times)

    def _most(self) -> list[tuple[Product, float]]:
        """Return the products with the most work, with as many rows as can be tried soon, and how often they count."""
        known = [one for one in self._counts if one.rows and one.inputs * one.outputs <= _LARGEST]
        most = sorted(known, key=lambda one: -one.work * self._counts[one])[:_SHAPES]
        limit = _WORK.get(self.subject.device.type, _WORK_OF_ACCELERATORS)
        rows = [max(1, min(one.rows, limit // (one.inputs * one.outputs))) for one in most]
        return [
            (one._replace(rows=number), self._counts[one] * one.rows / number)
            for one, number in zip(most, rows, strict=True)
        ]

    def _times(self, *products: Product) -> list[float]:
        """Return the seconds of each product, with operands that are cast from the dtype of the first."""
        device, dtype = self.subject.device, products[0].dtype
        with torch.no_grad():
            return times_of([_make_product_function(one, dtype, device) for one in products], device)

    def _of_precision(self, times: TypicalStep) -> Iterator[Saving]:
        if not self.subject.run.strategy.precision.is_plain:
            return
        tried = [each for each in self._most() if each[0].dtype is torch.float32]
        now = then = 0.0
        for one, number in tried:
            seconds = self._times(one, one._replace(dtype=torch.bfloat16))
            now, then = now + number * seconds[0], then + number * seconds[1]
        if then >= now:
            return
        share = _share_saved(now, then, times)
        yield Saving(
            "precision",
            share,
            f"The matrix products are in float32, and {self.subject.device.type} multiplies {now / then:.1f} times as "
            f"fast in bfloat16 (tried on {len(tried)} shapes of its layers): Trainer(precision='bf16-mixed') makes a "
            f"step {share:.0%} shorter.",
        )

    def _of_rows(self, times: TypicalStep) -> Iterator[Saving]:
        run, loader = self.subject.run, self.subject.run.train_dataloader
        number = run.accumulate_grad_batches
        size = loader.batch_size if isinstance(loader, DataLoader) else None
        if number < 2 or number % 2 or size is None or self.subject.has_stages or not self._has_room():
            return
        if any(isinstance(part, BatchNorm) for part in self.subject.module.modules()):
            return  # its statistics are those of a micro-batch
        few = _FEW_ROWS.get(self.subject.device.type, _FEW_ROWS_OF_ACCELERATORS)
        # where only a part of the rows is tried, there are many
        tried = [(one, count) for one, count in self._most() if one in self._counts and one.rows <= few]
        now = then = 0.0
        for one, count in tried:
            seconds = self._times(one, one._replace(rows=2 * one.rows))
            now, then = now + count * seconds[0], then + count / 2 * seconds[1]
        if then >= now:
            return
        share = _share_saved(now, then, times)
        yield Saving(
            "micro-batches",
            share,
            f"The micro-batches are small: twice as many rows cost only {2 * then / now:.2f} times as much (tried on "
            f"{len(tried)} shapes of the layers). batch_size={2 * size} with accumulate_grad_batches={number // 2} "
            f"trains the same steps, {share:.0%} shorter, and there is memory for it.",
        )

    def _has_room(self) -> bool:
        """Return whether there is memory for micro-batches of twice the size."""
        memory = self.subject.held_and_free()
        if memory is None:
            return False
        held, free = memory
        return free > (held if self.subject.device.type == CPU else 1.2 * held)


def _make_product_function(product: Product, held_in: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a function that computes a layer's products of a step, whose operands and gradients are of a dtype."""
    given = torch.full((product.rows, product.inputs), 0.5, dtype=held_in, device=device)
    weight = torch.full((product.outputs, product.inputs), 0.5, dtype=held_in, device=device)
    gradient, total = torch.full((product.rows, product.outputs), 0.5, dtype=held_in, device=device), weight.clone()

    def compute() -> None:
        rows, cast, of_output = given.to(product.dtype), weight.to(product.dtype), gradient.to(product.dtype)
        nn.functional.linear(rows, cast)
        torch.mm(of_output, cast)
        total.add_(torch.mm(of_output.t(), rows))

    return compute


def _share_saved(now: float, then: float, times: TypicalStep) -> float:
    """Return the share of a step that is saved if its products take less; they take no more than its whole work."""
    work = min(now, times.step - times.wait)
    return work * (1 - then / now) / times.step
