"""Timeline of a window: what each rank of a pipeline did, how long it took, and where it waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from ..devices.queries import synchronize_device
from ..distributed.collectives import Collectives
from .schedule import Action, Schedule

Doing = Literal["forward", "backward", "backward of inputs", "backward of weights", "transfer"]

_DOING: Final[Mapping[str, Doing]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}
"""What a rank does in each kind of action; all others are transfers."""
_PINGS: Final = 8
"""Exchanges by which two ranks compare their clocks."""


class StageSpan(NamedTuple):
    """What a rank did without a break, in seconds since the window began."""

    rank: int
    doing: Doing
    stage: int
    micro_batch: int
    begin: float
    end: float


class _Note(NamedTuple):
    """A span as its own rank sees it: on its own clock, and without knowing when what it waited for was sent."""

    kind: str
    """That of an `Action`, or ``WAIT_F`` or ``WAIT_B`` where a forward or a backward waited for what it needs."""
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class WindowTimeline:
    """When the ranks of a pipeline worked on the micro-batches of one step."""

    schedule: Schedule
    num_micro_batches: int
    is_simple: bool
    """Whether all forwards came before all backwards, as for batches of shapes not seen before."""
    seconds: float
    """From the start of the first action on any rank to the end of the last one."""
    spans: Sequence[StageSpan]
    """What the ranks did; they are idle in between."""

    def seconds_of(self, rank: int) -> dict[Doing, float]:
        """Return how long a rank did each kind of thing."""
        totals = dict.fromkeys((*_DOING.values(), "transfer"), 0.0)
        for span in self.spans:
            if span.rank == rank:
                totals[span.doing] += span.end - span.begin
        return totals

    @property
    def idle_share(self) -> float:
        """The share of the time in which ranks neither computed nor transferred, on average."""
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (self.seconds * self.schedule.num_ranks)

    @property
    def transfer_share(self) -> float:
        """The share of the time in which ranks sent, or waited for data on its way, on average."""
        transfers = sum(span.end - span.begin for span in self.spans if span.doing == "transfer")
        return transfers / (self.seconds * self.schedule.num_ranks)

    @property
    def expected_idle_share(self) -> float:
        """The share if all stages took equally long, a backward twice a forward, and transfers no time."""
        is_whole = all(span.doing != _DOING["W"] for span in self.spans)  # also under schedules with halves
        return self.schedule.idle_share(self.num_micro_batches, is_simple=self.is_simple, is_whole=is_whole)


class WindowRecorder:
    """Notes what one rank does in a window; on a GPU it waits for the device after each action.

    Args:
        schedule: the order of the actions.
        collectives: of the ranks of the pipeline.
        device: this rank's device.
    """

    def __init__(self, schedule: Schedule, collectives: Collectives, device: torch.device) -> None:
        self._schedule, self._collectives, self._device = schedule, collectives, device
        self._notes: list[_Note] = []
        self._begun = 0.0
        """When the current action began, or when what it waited for had come: it computes only then."""
        self._clock_ahead = 0.0
        self.num_micro_batches = 0
        """Of the recorded window; 0 until one is recorded."""
        self._is_simple = False

    def begin(self, num_micro_batches: int, *, is_simple: bool) -> None:
        """Compare clocks, and synchronize the ranks. Collective: every rank of the pipeline calls it."""
        self.num_micro_batches, self._is_simple = num_micro_batches, is_simple
        self._clock_ahead = _clock_ahead(self._collectives)
        self._collectives.barrier()

    def around(self, do: Mapping[str, Callable[..., None]]) -> dict[str, Callable[..., None]]:
        """Return functions that do the same and are recorded; each gets the action first."""
        return {kind: self._recorded(kind, function) for kind, function in do.items()}

    def _recorded(self, kind: str, function: Callable[..., None]) -> Callable[..., None]:
        def run(action: Action, *args: object) -> None:
            self._begun = time.perf_counter()
            function(action, *args)
            if kind in _DOING:
                self._finish_device()
            self._notes.append(_Note(kind, action.stage, action.micro_batch, self._begun, time.perf_counter()))

        return run

    @contextmanager
    def waiting(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Record the time inside as a wait for what a forward (``F``) or a backward (``B``) of a stage needs."""
        begin = time.perf_counter()
        yield
        self._finish_device()
        self._begun = time.perf_counter()
        self._notes.append(_Note(f"WAIT_{kind}", stage, micro_batch, begin, self._begun))

    def _finish_device(self) -> None:
        synchronize_device(self._device)

    def gather(self) -> WindowTimeline:
        """Return the window as all ranks saw it. Collective: every rank of the pipeline calls it."""
        own = [note._replace(begin=note.begin - self._clock_ahead, end=note.end - self._clock_ahead)
               for note in self._notes]  # fmt: skip
        notes: list[list[_Note]] = self._collectives.all_gather_object(own)
        began = min(note.begin for of_rank in notes for note in of_rank)
        seconds = max(note.end for of_rank in notes for note in of_rank) - began
        spans = [span for rank in range(len(notes)) for span in _spans_of_rank(notes, rank, began)]
        return WindowTimeline(self._schedule, self.num_micro_batches, self._is_simple, seconds, spans)


def _spans_of_rank(notes: Sequence[Sequence[_Note]], rank: int, began: float) -> Iterator[StageSpan]:
    """Yield the spans of a rank; a wait counts only from when what it waits for was sent."""
    sent = {note[:3]: note.begin for of_rank in notes for note in of_rank if note.kind.startswith("SEND")}
    for note in notes[rank]:
        begin = note.begin
        if note.kind == "WAIT_F":
            begin = max(begin, sent.get(("SEND_F", note.stage - 1, note.micro_batch), begin))
        elif note.kind == "WAIT_B":
            begin = max(begin, sent.get(("SEND_B", note.stage + 1, note.micro_batch), begin))
        if begin < note.end:
            doing = _DOING.get(note.kind, "transfer")
            yield StageSpan(rank, doing, note.stage, note.micro_batch, begin - began, note.end - began)


def _clock_ahead(collectives: Collectives) -> float:
    """Return by how many seconds this rank's clock is ahead of rank 0's; 0 if too little to measure. Collective.

    The fastest of several exchanges counts: the other rank is taken to read its clock halfway through (Cristian,
    "Probabilistic clock synchronization", 1989).
    """
    ahead = [0.0] * collectives.world_size
    for rank in range(1, collectives.world_size):
        if collectives.rank == rank:
            for _ in range(_PINGS):
                collectives.recv(0)
                collectives.send(time.perf_counter(), 0)
        elif collectives.rank == 0:
            ahead[rank] = _compare_clock(collectives, rank)
    return float(collectives.broadcast(ahead)[collectives.rank])


def _compare_clock(collectives: Collectives, rank: int) -> float:
    fastest, difference = float("inf"), 0.0
    for _ in range(_PINGS):
        begin = time.perf_counter()
        collectives.send(None, rank)
        theirs = collectives.recv(rank)
        end = time.perf_counter()
        if end - begin < fastest:
            fastest, difference = end - begin, theirs - (begin + end) / 2
    # processes of one machine share one clock, which is more exact than any measurement of it
    return difference if abs(difference) > fastest / 2 else 0.0
