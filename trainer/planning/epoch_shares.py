"""Shares of an epoch: how many of its samples each data rank reads, as the index stream of training deals them out."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.map_stream import MapStream
from ..data.stream import Cut
from ..data.train_data import stream_of


@dataclass(frozen=True)
class EpochShares:
    """The samples of an epoch by data rank, or its batches if they come ready-made."""

    num_entries: int
    """Of the whole epoch, without those that ``drop_last`` drops."""
    by_rank: list[int]
    global_batch_size: int
    least: int
    """The smallest share of a whole global batch that any rank reads."""
    last_batch: int
    """The size of the last global batch, if it is smaller than the others; otherwise 0."""
    first: list[int]
    """The indices of this rank's first micro-batch, as far as they are known."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks' shares add up to the epoch."""
        return sum(self.by_rank) == self.num_entries


def shares_of_epoch(loader: object, cut: Cut, seed: int) -> EpochShares | None:
    """Return the ranks' shares of the first epoch; None if only reading can tell, or each rank reads its own data."""
    stream = stream_of(loader, seed, cut)
    if not isinstance(stream, MapStream) or stream.num_streams > 1 or stream.indices.end is None:
        return None
    share, end = stream.share, stream.indices.end
    whole, rest = divmod(end, share.global_batch_size)

    def part(num_entries: int, rank: int) -> int:
        own = share.of(num_entries, rank)
        return len(range(own.start, own.stop))

    ranks = range(share.data_size)
    before = stream.indices.place()
    window = next(stream.indices.windows(), ())
    stream.indices.go_back(before)  # training draws from the same sampler
    first = list.__getitem__(indices, slice(None)) if window and isinstance(indices := window[0].indices, list) else []
    return EpochShares(
        num_entries=end,
        by_rank=[whole * part(share.global_batch_size, rank) + part(rest, rank) for rank in ranks],
        global_batch_size=share.global_batch_size,
        least=min(part(min(end, share.global_batch_size), rank) for rank in ranks),
        last_batch=rest,
        first=first,
    )
