"""Exchanges of keys and values between the ranks that share sequences, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...common.errors import ConfigError
from ..distributed.tensor_collectives import Wire, all_gather, all_to_all
from ..torch_internals.tensors import read_memory_id
from .near import NearTokens
from .part_lengths import PartLengths
from .sequence import SequenceLayout

if TYPE_CHECKING:
    from torch import distributed as dist


class Exchange:
    """Gathers tensors along a dimension, or exchanges parts of the sequence for heads, over the ranks of a group.

    Args:
        group: torch's process group.
        cut: how sequences are cut over its ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, cut: SequenceLayout, device: torch.device | None = None
    ) -> None:
        self.cut = cut
        self._device = device
        self._wire = Wire(group, cut.size, cut.rank, announce=lambda operation, gradient: None)
        self.lengths = PartLengths(cut, self._sum)

    def _sum(self, number: int) -> int:
        return int(all_gather(self._wire, torch.tensor([number], device=self._device)).sum())

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the whole tensor made of every rank's part, in order. Collective, and so is its backward."""
        if part.dtype == torch.bool:
            return self.gather(part.to(torch.uint8), dim).bool()
        length = self.lengths.whole(part.shape[dim])
        sent = _pad_to_length(part, dim, self.cut.longest_part(length))
        parts = all_gather(self._wire, sent.reshape(-1)).view(self.cut.size, *sent.shape)
        return self.cut.join(parts.unbind(), dim, length)

    def gather_near(self, part: Tensor, dim: int, near: NearTokens) -> Tensor:
        """Return the tokens that this rank's tokens reach, in order. Collective, and so is its backward."""
        return near.exchange(self._wire, part, dim)

    def merge(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over the ranks, without gradients. Collective."""
        rows = all_gather(self._wire, numbers.detach())
        return rows.view(self.cut.size, -1).sum(0)

    def check_heads(self, queries: int, keys: int) -> None:
        """Check that the ranks can exchange these numbers of heads for parts of the sequence, see `to_heads`.

        Raises:
            ConfigError: if they cannot.
        """
        if queries % self.cut.size or keys % self.cut.size:
            raise ConfigError(
                f"cp={self.cut.size} with cp_exchange='ulysses' must divide the number of attention heads, got "
                f"{queries} query heads and {keys} key heads; choose another cp, or cp_exchange='allgather'."
            )

    def to_heads(self, part: Tensor) -> Tensor:
        """Return whole sequences for this rank's heads, given this rank's part with all heads. Collective.

        Shapes: (..., heads, part, width) to (..., heads / n, length, width).
        """
        size, length = self.cut.size, self.lengths.whole(part.shape[-2])
        sent = _pad_to_length(part, -2, self.cut.longest_part(length))
        heads, most, width = sent.shape[-3:]
        parts = sent.reshape(-1, size, heads // size, most, width).movedim(1, 0)
        traded = all_to_all(self._wire, parts.reshape(-1)).view(parts.shape)
        return self.cut.join(traded.unbind(), -2, length).view(*part.shape[:-3], heads // size, length, width)

    def to_sequence(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sequences with all heads; the inverse of `to_heads`. Collective."""
        size, (heads, length, width) = self.cut.size, whole.shape[-3:]
        most = self.cut.longest_part(length)
        batches = whole.reshape(-1, heads, length, width)
        sent = torch.stack([_pad_to_length(self.cut.take(batches, -2, rank), -2, most) for rank in range(size)])
        traded = all_to_all(self._wire, sent.reshape(-1)).view(sent.shape)
        parts = traded.movedim(0, 1).reshape(*whole.shape[:-3], size * heads, most, width)
        return parts.narrow(-2, 0, self.cut.part_length(length))


def _pad_to_length(part: Tensor, dim: int, length: int) -> Tensor:
    """Return a part with zeros after it, as ranks exchange parts of one length only."""
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)


@contextmanager
def gathered_again(gather: Callable[[Tensor], Tensor], pairs: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """For the backward of the block, save parts instead of the whole tensors that were gathered from them.

    The backward gathers them again, so that each of n ranks keeps only 1/n of the keys and values.

    Args:
        gather: gathers the parts.
        pairs: each part with its whole tensor.
    """
    regathered = {read_memory_id(whole): _Regathered(gather, part.detach()) for part, whole in pairs}

    def pack(tensor: Tensor) -> object:
        kept = regathered.get(read_memory_id(tensor))
        return tensor if kept is None else kept.pack(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].unpack(*packed[1:])

    with saved_tensors_hooks(pack, unpack):
        yield


class _Regathered:
    """A tensor that is gathered when the first of its views is needed, and released after the last."""

    def __init__(self, gather: Callable[[Tensor], Tensor], part: Tensor) -> None:
        self._gather, self._part = gather, part
        self._num_views, self._num_open = 0, 0
        self._whole: Tensor | None = None

    def pack(self, view: Tensor) -> tuple[object, ...]:
        self._num_views += 1
        return self, view.shape, view.stride(), view.storage_offset()

    def unpack(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if self._whole is None:
            self._whole, self._num_open = self._gather(self._part), self._num_views
        view = self._whole.as_strided(shape, stride, offset)
        self._num_open -= 1
        if self._num_open == 0:
            self._whole = None
        return view
