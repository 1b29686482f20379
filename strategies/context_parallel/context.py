"""ContextParallel: a module's steps on parts of the sequences in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, DataError, did_you_mean
from ..distributed.nested import named_leaves, with_leaves
from .attention import EXCHANGES, AttentionMode, ExchangeKind
from .exchange import Exchange
from .overridable import make_attention_overridable
from .sequence import SequenceLayout

if TYPE_CHECKING:
    from torch import distributed as dist


class ContextParallel:
    """Cuts the sequences of batches over the ranks of a group, and lets attention see whole sequences.

    Args:
        group: torch's process group of the ranks that share sequences.
        size: the number of these ranks.
        rank: the index of this rank among them.
        exchange: how attention reaches the keys of other ranks, see `AttentionMode`.
        num_chunks: of each sequence that a rank has, an even number; one with ``"ulysses"``.
        sequence_dim: the sequence dimension of a batch's tensors, unless the module's ``sequence_dims`` names it.
        device: of this rank; by default the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        size: int,
        rank: int,
        *,
        exchange: ExchangeKind,
        num_chunks: int = 2,
        sequence_dim: int,
        device: torch.device | None = None,
    ) -> None:
        self.size = size
        # ulysses distributes heads, not queries
        self.sequence_cut = SequenceLayout(size, rank, num_chunks if exchange == "allgather" else 1)
        self._exchange = Exchange(group, self.sequence_cut, device)
        self._mode = AttentionMode(self._exchange, exchange)
        self._sequence_dim = sequence_dim
        self.is_cut = False
        """Whether a step runs on this rank's part of a batch."""
        self._current: Sequence[int] = ()
        self._is_recomputing = False

    def begin(self, lengths: Sequence[int]) -> None:
        """Begin a step on a batch with sequences of these lengths."""
        self._current = lengths
        self._exchange.lengths.begin(lengths)

    @property
    def signature(self) -> tuple[bool, tuple[int, ...]]:
        """What runs now, the same on all ranks: whether a part, and the lengths of the batch's sequences."""
        return self.is_cut, tuple(self._current)

    def cut(self, batch: object, module: nn.Module) -> object:
        """Return a batch with this rank's part of each sequence; none may be short, see `is_short`.

        Raises:
            DataError: for lengths that differ without ``sequence_dims``.
        """
        dims = self._dims(batch, module)
        self.begin(self._lengths(batch, dims))
        leaves = []
        for name, leaf in named_leaves(batch):
            dim = dims[name]
            leaves.append(leaf if dim is None else self.sequence_cut.take(leaf, dim))
        return with_leaves(batch, leaves)

    def lengths(self, batch: object, module: nn.Module) -> list[int]:
        """Return the lengths of the batch's sequences.

        Raises:
            DataError: if they cannot be cut, see `cut`.
        """
        return self._lengths(batch, self._dims(batch, module))

    def share(self, lengths: Sequence[int]) -> float | None:
        """Return how much of a mean over tokens is this rank's, in equal shares; None if sequences differ in theirs."""
        cut = self.sequence_cut
        if self.is_short(lengths):
            return 0.0 if cut.rank else float(self.size)
        if len({tuple(self._shares(length)) for length in lengths}) > 1:
            return None
        return self._shares(lengths[0])[cut.rank]

    def is_short(self, lengths: Sequence[int]) -> bool:
        """Return whether a batch is too short to be cut, so that each rank computes all, and the first one counts.

        A part has at least two tokens: attention takes a single query for the next one that a model generates, and a
        dimension of size 1 for one that is the same for all tokens.
        """
        return min(lengths) < 2 * self.size

    def _shares(self, length: int) -> list[float]:
        cut = self.sequence_cut
        return [self.size * cut.part_length(length, rank) / length for rank in range(self.size)]

    def _lengths(self, batch: object, dims: Mapping[str, int | None]) -> list[int]:
        lengths = [leaf.shape[dims[name]] for name, leaf in named_leaves(batch) if dims[name] is not None]
        if not lengths:
            shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor)}
            raise DataError(
                f"A batch under cp={self.size} must have a tensor with a sequence in dimension {self._sequence_dim}, "
                f"got shapes {shapes}; give sequence_dim, or return the dimension of each tensor in sequence_dims."
            )
        return lengths

    def _dims(self, batch: object, module: nn.Module) -> dict[str, int | None]:
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
        """Return the positions of `length` tokens; inside `attention`, those of this rank's part of the sequence.

        Collective where a batch has sequences of nearly the same length, see `PartLengths`.
        """
        if not self.is_cut:
            return torch.arange(length, device=device)
        return self.sequence_cut.positions(self._exchange.lengths.whole(length), device)

    def whole_length(self, part: int) -> int:
        """Return the length of the sequence of which this rank has a part; see `positions`."""
        return self._exchange.lengths.whole(part)

    def note_reach(self, mask: Tensor, document_ids: Tensor | None, window: int | None) -> None:
        """Note what a causal mask of this part's tokens allows at most; see `AttentionMode.note_reach`."""
        self._mode.note_reach(mask, document_ids, window, is_causal=True)

    def block_mask(self, document_ids: Tensor, rows: Tensor, **limits: object) -> object:
        """Return this part's rows of a block mask over whole sequences; see `AttentionMode.block_mask`."""
        return self._mode.block_mask(document_ids, rows, **limits)

    def merge(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over the ranks that share the sequences. Collective."""
        return self._exchange.merge(numbers)

    def whole(self, part: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of which each rank has the part of its sequences. Collective."""
        return self._exchange.gather(part, dim)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Let attention inside the block exchange keys and values, for a batch that has been `cut`."""
        self.is_cut = True
        make_attention_overridable()
        try:
            with self._mode:
                yield
        finally:
            self.is_cut = False

    @contextmanager
    def recomputing(self, lengths: Sequence[int] = ()) -> Iterator[None]:
        """Let a backward inside the block recompute parts of a step.

        That of the batch that ran last, or of one with sequences of these lengths; inside of another such block, its.
        """
        lengths, before = lengths or self._current, self._current
        if self._is_recomputing or not lengths:
            yield
            return
        self._is_recomputing = True
        self.begin(lengths)
        try:
            with nullcontext() if self.is_short(lengths) else self.attention():
                yield
        finally:
            self._is_recomputing = False
            self.begin(before)


def check_exchange(exchange: object, num_chunks: object) -> None:
    """Check that an exchange exists, and that it takes this number of chunks.

    Raises:
        ConfigError: for anything else.
    """
    if exchange not in EXCHANGES:
        known = ", ".join(EXCHANGES)
        raise ConfigError(
            f"cp_exchange must be one of {known}, got {exchange!r}.{did_you_mean(str(exchange), EXCHANGES)}"
        )
    if not isinstance(num_chunks, int) or num_chunks < 2 or num_chunks % 2:
        raise ConfigError(
            f"cp_chunks must be an even number of chunks for each rank, got {num_chunks!r}; give 2, or more to even "
            "out the work of attention inside of documents."
        )
    if exchange == "ulysses" and num_chunks != 2:
        raise ConfigError(
            f"cp_chunks={num_chunks} divides the work of queries, but cp_exchange='ulysses' divides heads; leave it "
            "out, or use cp_exchange='allgather'."
        )
