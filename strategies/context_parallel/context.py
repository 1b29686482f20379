"""ContextParallel: a module's steps on parts of the sequences in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, DataError, did_you_mean
from ..distributed.nested import named_leaves, with_leaves
from .attention import EXCHANGES, AttentionMode, ExchangeKind
from .exchange import Exchange
from .sequence import SequenceLayout


class ContextParallel:
    """Cuts the sequences of batches over the ranks of a group, and lets attention see whole sequences.

    Args:
        group: torch's process group of the ranks that share sequences.
        size: the number of these ranks.
        rank: the index of this rank among them.
        exchange: how attention reaches the keys of other ranks, see `AttentionMode`.
        sequence_dim: the sequence dimension of a batch's tensors, unless the module's ``sequence_dims`` names it.
    """

    def __init__(self, group: Any, size: int, rank: int, *, exchange: ExchangeKind, sequence_dim: int) -> None:
        self.size = size
        # ulysses distributes heads, not queries
        self.sequence_cut = SequenceLayout(size, rank, is_balanced=exchange == "allgather")
        self._exchange = Exchange(group, self.sequence_cut)
        self._mode = AttentionMode(self._exchange, exchange)
        self._sequence_dim = sequence_dim
        self.is_cut = False
        """Whether a step runs on this rank's part of a batch."""

    def cut(self, batch: Any, module: nn.Module) -> Any:
        """Return a batch with this rank's part of each sequence.

        Raises:
            DataError: for lengths that are not a multiple of the number of ranks, or that differ without
                ``sequence_dims``.
        """
        dims = self._dims(batch, module)
        lengths = self._lengths(batch, dims)
        leaves = []
        for name, leaf in named_leaves(batch):
            dim = dims[name]
            leaves.append(leaf if dim is None else self.sequence_cut.take(leaf, dim))
        self._mode.lengths = frozenset(length // self.size for length in lengths)
        return with_leaves(batch, leaves)

    def lengths(self, batch: Any, module: nn.Module) -> list[int]:
        """Return the lengths of the batch's sequences.

        Raises:
            DataError: if they cannot be cut, see `cut`.
        """
        return self._lengths(batch, self._dims(batch, module))

    def _lengths(self, batch: Any, dims: Mapping[str, int | None]) -> list[int]:
        lengths = []
        for name, leaf in named_leaves(batch):
            dim = dims[name]
            if dim is None:
                continue
            lengths.append(leaf.shape[dim])
            if lengths[-1] % self.size:
                raise DataError(
                    f"The length of batch{name} must be a multiple of cp={self.size}, got {lengths[-1]} in dimension "
                    f"{dim} of shape {tuple(leaf.shape)}; pad sequences in collate_fn, and ignore the padding in the "
                    "loss."
                )
        if not lengths:
            shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor)}
            raise DataError(
                f"A batch under cp={self.size} must have a tensor with a sequence in dimension {self._sequence_dim}, "
                f"got shapes {shapes}; give sequence_dim, or return the dimension of each tensor in sequence_dims."
            )
        return lengths

    def _dims(self, batch: Any, module: nn.Module) -> dict[str, int | None]:
        """Return the dimension that is cut for each leaf of the batch, by name; None if it is not cut."""
        hook = getattr(module, "sequence_dims", None)
        answer = None if hook is None else hook(batch)
        leaves = dict(named_leaves(batch))
        if answer is not None:
            given = dict(named_leaves(answer))
            if given.keys() != leaves.keys():
                raise ConfigError(
                    f"sequence_dims of {type(module).__name__} must return a dimension or None for each of "
                    f"{', '.join(leaves) or 'the batch'}, got {answer!r:.100}; return them in the batch's structure."
                )
            return given
        dims = {
            name: self._sequence_dim if isinstance(leaf, Tensor) and leaf.ndim > self._sequence_dim else None
            for name, leaf in leaves.items()
        }
        lengths = {name: leaves[name].shape[dim] for name, dim in dims.items() if dim is not None}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"batch{name}: {length}" for name, length in lengths.items())
            raise DataError(
                f"Sequences under cp={self.size} are in dimension {self._sequence_dim} of each tensor, but the lengths "
                f"differ ({listed}); return from {type(module).__name__}.sequence_dims(batch) which dimension of each "
                "tensor is a sequence, or None for tensors without one."
            )
        return dims

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of `length` tokens; inside `attention`, those of this rank's part of the sequence."""
        if not self.is_cut:
            return torch.arange(length, device=device)
        return self.sequence_cut.positions(self.size * length, device)

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of which each rank has the part of its sequences. Collective."""
        return self._exchange.gather(part, dim)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let attention inside the block exchange keys and values, for a batch that has been `cut`."""
        self.is_cut = True
        try:
            with self._mode:
                yield
        finally:
            self.is_cut = False

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Let a backward inside the block recompute parts of a step, maybe not that of the batch `cut` last."""
        lengths, self._mode.lengths = self._mode.lengths, None
        try:
            with self.attention():
                yield
        finally:
            self._mode.lengths = lengths


def check_exchange(exchange: object) -> None:
    """Check that an exchange exists.

    Raises:
        ConfigError: for anything else.
    """
    if exchange not in EXCHANGES:
        known = ", ".join(EXCHANGES)
        raise ConfigError(
            f"cp_exchange must be one of {known}, got {exchange!r}.{did_you_mean(str(exchange), EXCHANGES)}"
        )
