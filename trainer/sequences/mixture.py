"""Mixture: several data sets read as one, in given proportions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ...common.errors import ConfigError
from ..data.seed import derive_seed, mix_seed, seed_generators
from ..streams.probe import NUM_PROBED
from ..streams.stated import saves_state
from .interleaving import Interleaving, keys_of
from .mixed_source import MixedSource, Place, is_stream
from .mixture_weights import Phases, phases_of, weights_of
from .stream_cursor import StreamLanes, num_lanes

Stop = Literal["first_exhausted", "all_exhausted"] | int
_STOPS: Final = ("first_exhausted", "all_exhausted")
_ENDLESS: Final = 1 << 62


class MixedSample(NamedTuple):
    """Which sample a mixture has at a position."""

    source: str
    epoch: int
    """How often the source has gone through all its samples before."""
    place: int
    """The index of the sample in the source; for a stream, the number of samples before it."""


class Mixture(Dataset[Any]):
    """A data set that draws from several, in the proportions of their weights.

    The sources are interleaved at random, but evenly: any stretch of the order has the share of each, to within two
    samples. Each source goes through all its samples, in an order of its own, before one comes twice; it goes on in the
    next epoch of the mixture where it was in the last. The sample at a position depends on seed, epoch and position
    alone, so a run that is resumed, with other numbers of ranks or workers, goes on exactly.

    If a source is a stream (an ``IterableDataset``), so is the mixture. Each rank and worker reads shards of its own,
    if the stream has some; else all of it, and keeps its part.

    Args:
        sources: ``{name: (data set, weight)}``; or ``{name: data set}``, whose weights are their sizes.
        stop: what ends an epoch: ``"first_exhausted"``, when a source has gone through its samples for the first time;
            ``"all_exhausted"``, when all have; or a number of samples.
        by: what weights are shares of: ``"samples"``, or ``"tokens"``, for which lengths must be known.
        temperature: weights are raised to the power 1 / temperature: above 1, small sources come more often.
        schedule: weights that change: ``[(from_sample, {name: weight}), ...]``, or a function from a position to
            ``{name: weight}``, which is asked every 1024 samples. Positions count from the start of training.
        lengths: for each source its tokens: a number for each sample, or one for all. Without it, those of a
            `PackedDataset` or `TokenFile` are known, and others are counted if `by` is ``"tokens"``.
        shuffle: False: the samples of each source come in order.
        seed: of the order.

    Raises:
        ConfigError: for impossible weights or settings.
        DataError: for a source without samples, or one that is no data set.

    Example::

        web, code = torch.randn(300, 4), torch.randn(100, 4)
        mixture = Mixture({"web": (web, 0.7), "code": (code, 0.3)}, stop="all_exhausted")
        train_loader = DataLoader(mixture, batch_size=32)
    """

    has_own_order = True
    """A loader reads it in order: it is shuffled already, and ``shuffle=True`` changes nothing under a Trainer."""

    def __new__(cls, sources: object = None, **settings: object) -> Mixture:
        """Return a stream if a source is one."""
        return super().__new__(StreamedMixture if cls is Mixture and _has_stream(sources) else cls)

    def __init__(
        self,
        sources: Mapping[str, object],
        *,
        stop: Stop = "first_exhausted",
        by: Literal["samples", "tokens"] = "samples",
        temperature: float = 1.0,
        schedule: Phases | None = None,
        lengths: Mapping[str, object] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        _check_sources(sources, stop, by)
        names = list(sources)
        keys = keys_of(names, seed)
        self._sources: list[MixedSource] = [
            MixedSource(name, _dataset_of(given), key, shuffle=shuffle)
            for (name, given), key in zip(sources.items(), keys, strict=True)
        ]
        self._take_lengths(lengths or {}, by)
        weights = weights_of(sources, self._sources, temperature, is_scheduled=schedule is not None)
        means = [source.mean_length if by == "tokens" else 1.0 for source in self._sources]
        phases, weights_at = phases_of(names, weights, schedule, means)
        self._order = Interleaving(phases, keys, weights_at)
        self.epoch, self.seed = 0, seed
        self._length = stop if isinstance(stop, int) else self._find_end(stop, is_endless=weights_at is not None)
        self._chunk: tuple[int, list[tuple[int, Place]]] = (0, [])

    def _take_lengths(self, lengths: Mapping[str, object], by: str) -> None:
        names = [source.name for source in self._sources]
        for name in lengths:
            if name not in names:
                raise ConfigError(f"lengths names {name!r}, but the sources are {', '.join(names)}; name these.")
        for source in self._sources:
            source.take_lengths(lengths.get(source.name), is_needed=by == "tokens")

    def _find_end(self, stop: str, *, is_endless: bool) -> int:
        """Return the position at which the first, or last, source has gone through its samples."""
        unknown = [source.name for source in self._sources if source.size is None]
        if unknown or is_endless:
            reason = f"the stream {unknown[0]!r} has no length" if unknown else "schedule is a function"
            raise ConfigError(
                f"stop must be the number of samples in an epoch, as {reason}, got stop={stop!r}; give stop=1_000_000 "
                "or the like."
            )
        ends: list[int] = []
        for number, source in enumerate(self._sources):
            assert source.size is not None
            end = self._order.end_of(number, source.size - 1, _ENDLESS)
            if end is not None:
                ends.append(end)
            elif stop == "all_exhausted":
                raise ConfigError(
                    f"stop='all_exhausted' never comes: the last weight of {source.name!r} in the schedule is 0 before "
                    f"its {source.size} samples are drawn; give it a weight, or a number of samples as stop."
                )
        return min(ends) if stop == "first_exhausted" else max(ends)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, in a loop of your own; the Trainer needs no call."""
        self.epoch = epoch

    def draw(self, index: int, epoch: int | None = None) -> MixedSample:
        """Return which sample comes at a position of an epoch, by default of the current one.

        Raises:
            IndexError: for a position outside.
        """
        source, (own_epoch, place) = self._at(index, self.epoch if epoch is None else epoch)
        return MixedSample(self._sources[source].name, own_epoch, place)

    def __getitem__(self, index: int) -> Any:
        source, place = self._at(index, self.epoch)
        return self._sources[source].read(*place)

    def _at(self, index: int, epoch: int) -> tuple[int, Place]:
        if not -self._length <= index < self._length:
            raise IndexError(f"index must be below {self._length}, got {index}")
        return self._placed(epoch * self._length + index % self._length)

    def _placed(self, position: int) -> tuple[int, Place]:
        """Return the source and the place of the sample at a position since the start of training."""
        first, placed = self._chunk
        if not first <= position < first + len(placed):
            first, draws = self._order.chunk(position)
            places: list[list[Place]] = []
            for number, source in enumerate(self._sources):
                drawn = [before for other, before in draws if other == number]
                places.append(source.places(drawn[0], drawn[-1] + 1) if drawn else [])
            following = [iter(each) for each in places]
            placed = [(number, next(following[number])) for number, _ in draws]
            self._chunk = first, placed
        return placed[position - first]

    # --- shares ------------------------------------------------------------------------------------------------------

    def progress(self, index: int, epoch: int | None = None) -> dict[str, float]:
        """Return how many samples, and tokens if lengths are known, came from each source before a position.

        They count from the start of training; the Trainer logs them.
        """
        epoch = self.epoch if epoch is None else epoch
        counts = self._order.counts(epoch * self._length + min(index, self._length))
        found: dict[str, float] = {}
        for source, count in zip(self._sources, counts, strict=True):
            found[f"mixture/{source.name}/samples"] = float(count)
            if source.lengths is not None:
                found[f"mixture/{source.name}/tokens"] = float(source.num_tokens(count))
        return found


class StreamedMixture(Mixture, IterableDataset[Any]):
    """The samples of a `Mixture` in their order, which any reader goes through and picks its own from.

    Streams are read from their beginning to their end, and again, by shards if they have some; samples of data sets
    with indices are read only where they are picked. Under a Trainer each rank and worker picks its batches.
    """

    _lanes: Mapping[str, StreamLanes] | None = None
    _position = 0
    """The position, since the start of training, up to which lanes have counted."""
    _block = 1
    _saved: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave out the streams that are being read in this process."""
        return {**self.__dict__, "_lanes": None}

    @property
    def num_lanes(self) -> int:
        """How many readers can go through parts of the streams that no other one needs."""
        return math.gcd(*(num_lanes(source.dataset) for source in self._sources if source.is_stream))

    def __iter__(self) -> Iterator[object]:
        info = get_worker_info()
        worker, size = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample for _, sample in self.samples_from(0, lambda position: position % size == worker, 1))

    def samples_from(self, start: int, wanted: Callable[[int], bool], block: int) -> Iterator[tuple[int, object]]:
        """Yield those samples of the epoch, with their positions, from one position on, that are wanted."""
        base, key = self.epoch * len(self), derive_seed(self.seed, self.epoch)
        lanes = self._lanes_at(base + start, block)
        for position in range(start, len(self)):
            number, place = self._placed(base + position)
            source, is_wanted = self._sources[number], wanted(position)
            if source.is_stream:
                sample = lanes[source.name].draw(position // block, is_wanted=is_wanted)
            elif is_wanted:
                seed_generators(mix_seed(key, position))
                sample = source.read(*place)
            self._position = base + position + 1
            if is_wanted:
                yield position, sample

    def _lanes_at(self, position: int, block: int) -> Mapping[str, StreamLanes]:
        """Return the streams at a position: from a saved state, or as they were left, or from their beginning."""
        saved, self._saved = self._saved, None
        lanes, at, old_block = self._lanes, self._position, self._block
        if lanes is None or saved is not None or at > position:
            lanes, at, old_block = {each.name: StreamLanes(each) for each in self._sources if each.is_stream}, 0, block
        if saved is not None and saved["at"] <= position:
            at, old_block = saved["at"], saved["block"]
            for name in lanes.keys() & saved["lanes"].keys():
                lanes[name].load_state_dict(saved["lanes"][name])
        self._go_past(lanes, at, position, old_block)
        self._lanes, self._position, self._block = lanes, position, block
        return lanes

    def _go_past(self, lanes: Mapping[str, StreamLanes], start: int, stop: int, block: int) -> None:
        """Count the draws from lanes between two positions, with turns of `block` positions."""
        counts = dict(zip((source.name for source in self._sources), self._order.counts(stop), strict=True))
        if all(each.size == 1 for each in lanes.values()):
            for name, each in lanes.items():
                each.drawn = [counts[name]]
            return
        for place in range(start, stop):
            source = self._sources[self._placed(place)[0]]
            if source.is_stream:
                lanes[source.name].draw(place % len(self) // block, is_wanted=False)

    def look(self) -> list[object]:
        """Return the first samples of the streams, which are left as they were."""
        streams = [source.dataset for source in self._sources if source.is_stream]
        states = [dataset.state_dict() if saves_state(dataset) else None for dataset in streams]
        first = [sample for dataset in streams for sample in islice(iter(dataset), NUM_PROBED)]
        for dataset, state in zip(streams, states, strict=True):
            if state is not None:
                dataset.load_state_dict(state)
        return first

    def state_dict(self) -> dict[str, object]:
        """Return where the streams are after the sample that was read last."""
        lanes = {name: each.state_dict() for name, each in (self._lanes or {}).items()}
        return {"at": self._position, "block": self._block, "lanes": lanes}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Let the next reading begin with the streams where they were."""
        self._saved = state_dict


def _has_stream(sources: object) -> bool:
    """Return whether one of a mixture's sources is a stream, as far as they can be read."""
    given = sources.values() if isinstance(sources, Mapping) else ()
    return any(is_stream(_dataset_of(each)) for each in given)


def _dataset_of(given: object) -> object:
    return given[0] if isinstance(given, tuple) and given else given


def _check_sources(sources: object, stop: Any, by: object) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(
            f"Mixture takes {{name: (data set, weight)}} with at least one source, got {sources!r:.80}; name them."
        )
    for name, given in sources.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"Names of sources must be text without '/', got {name!r}; they are those of metrics.")
        if isinstance(given, tuple) and len(given) != 2:
            raise ConfigError(
                f"The source {name!r} must be (data set, weight), got a tuple of {len(given)}; make the data a list, "
                "or add the weight."
            )
    is_number = isinstance(stop, int) and not isinstance(stop, bool)
    if stop not in _STOPS and not is_number:
        raise ConfigError(
            f"stop must be {' or '.join(map(repr, _STOPS))}, or a number of samples, got {stop!r}; choose one."
        )
    if is_number and stop < 1:
        raise ConfigError(f"stop must be at least 1 sample, got stop={stop}; give a positive number.")
    if by not in ("samples", "tokens"):
        raise ConfigError(f"by must be 'samples' or 'tokens', got {by!r}; choose one of them.")
