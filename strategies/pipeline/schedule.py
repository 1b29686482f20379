"""Schedule: the order in which each rank of a pipeline runs its stages on the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

from ...common.errors import ConfigError, did_you_mean
from ..torch_internals.pipelining import add_transfers, compute_pipeline_order

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]
Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; backward, or its two halves, for inputs and for weights; transfers of activations and of gradients."""

_ONE_STAGE: Final = ("gpipe", "1f1b")
_V_SHAPED: Final = ("zbv_zero_bubble", "dualpipe_v")
_SPLIT: Final = ("interleaved_zero_bubble", *_V_SHAPED)
_OF_TORCH: Final[Mapping[str, str]] = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, and the stages of each rank.

    Sources: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", 2021; Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022; Qi et
    al., "Zero Bubble Pipeline Parallelism", 2023, and "Pipeline Parallelism with Controllable Memory", 2024; DeepSeek,
    "DualPipe", 2025.

    Raises:
        ConfigError: for an unknown name, or a number of stages per rank that the schedule does not allow.
    """

    name: ScheduleName
    num_ranks: int
    stages_a_rank: int

    @classmethod
    def of(cls, name: str, num_ranks: int, virtual_stages: int | None) -> Schedule:
        """Return the schedule with this name, by default with 1 or 2 stages per rank, whichever it is made for."""
        check_schedule(name, virtual_stages)
        default = 1 if name in _ONE_STAGE else 2
        return cls(name, num_ranks, virtual_stages or default)  # type: ignore[arg-type]

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return self.num_ranks * self.stages_a_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return self.name in _SPLIT

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage: stages go round-robin over the ranks, or up and back down."""
        lap, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.name in _V_SHAPED and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def reason_against(self, num_micro_batches: int) -> str:
        """Return what this number of micro-batches would have to be for the schedule; empty if it is suitable."""
        rounds = max(1, num_micro_batches // self.num_ranks)
        if self.name == "1f1b" and num_micro_batches < self.num_ranks:
            return f"at least {self.num_ranks}, one for each stage"
        if self.name == "dualpipe_v" and num_micro_batches < self.num_stages:
            return f"at least {self.num_stages}, one for each stage"
        if self.name in ("interleaved_1f1b", "interleaved_zero_bubble") and num_micro_batches % rounds:
            return f"a multiple of pp={self.num_ranks}, or fewer than twice that"
        return ""

    def actions(self, rank: int, num_micro_batches: int, *, is_simple: bool = False) -> Sequence[Action]:
        """Return what a rank does in a step, in order.

        With `is_simple`, and for numbers of micro-batches that do not suit the schedule, all forwards come before all
        backwards: then no two ranks send to each other at the same time.
        """
        is_simple = is_simple or bool(self.reason_against(num_micro_batches))
        return _plan_actions(self, num_micro_batches, is_simple)[rank]

    def idle_share(self, num_micro_batches: int, *, is_simple: bool = False, is_whole: bool = False) -> float:
        """Return the share of a step that ranks spend waiting, on average, if all stages and transfers are ideal.

        A forward takes one unit, a backward two, and each half of it one. `is_simple`: see `actions`. With `is_whole`,
        no backward is computed in halves.
        """
        orders = _plan_actions(self, num_micro_batches, is_simple or bool(self.reason_against(num_micro_batches)))
        if is_whole:
            orders = tuple(tuple(without_halves(actions)) for actions in orders)
        busy, end = _simulate_schedule(self, orders)
        return 1 - busy / (end * self.num_ranks)


def without_halves(actions: Sequence[Action]) -> Sequence[Action]:
    """Return the same order with whole backwards, where a schedule has the gradients of inputs."""
    return [action._replace(kind="B") if action.kind == "I" else action for action in actions if action.kind != "W"]


def check_schedule(name: str, virtual_stages: int | None) -> None:
    """Check the name of a schedule and the number of stages per rank.

    Raises:
        ConfigError: for an unknown name, or a number that it does not allow.
    """
    names = get_args(ScheduleName)
    if name not in names:
        raise ConfigError(
            f"schedule must be one of {', '.join(map(repr, names))}, got {name!r}.{did_you_mean(str(name), names)}"
        )
    if virtual_stages is None:
        return
    is_number = isinstance(virtual_stages, int) and not isinstance(virtual_stages, bool)
    if not is_number or virtual_stages < 1:
        raise ConfigError(
            f"virtual_stages must be an int >= 1, got {virtual_stages!r}; give the number of stages on each rank."
        )
    allowed = {**dict.fromkeys(_ONE_STAGE, "1"), **dict.fromkeys(_V_SHAPED, "2")}.get(name)
    if allowed is not None and str(virtual_stages) != allowed:
        raise ConfigError(
            f"virtual_stages must be {allowed} with schedule={name!r}, got {virtual_stages}; leave it out, or use "
            "another schedule, such as 'interleaved_1f1b'."
        )


@lru_cache(maxsize=64)
def _plan_actions(schedule: Schedule, number: int, is_simple: bool) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks, with transfers."""
    ranks = range(schedule.num_ranks)
    if is_simple or schedule.name == "gpipe":
        order = [_all_forwards_first(schedule.stages_of(rank), number) for rank in ranks]
    elif schedule.name == "1f1b":
        order = [_one_by_one(rank, schedule.num_ranks, number) for rank in ranks]
    else:
        found = compute_pipeline_order(_OF_TORCH[schedule.name], schedule.num_ranks, schedule.stages_a_rank, number)
        order = [[Action(kind, stage, index) for kind, stage, index in found[rank]] for rank in ranks]  # type: ignore[arg-type]
    complete = add_transfers(order, schedule.rank_of, schedule.num_stages)
    return tuple(tuple(Action(*action) for action in actions) for actions in complete)  # type: ignore[arg-type]


def _all_forwards_first(stages: Sequence[int], number: int) -> list[Action]:
    forwards = [Action("F", stage, index) for stage in stages for index in range(number)]
    return forwards + [Action("B", stage, index) for stage in reversed(stages) for index in range(number)]


def _one_by_one(rank: int, num_ranks: int, number: int) -> list[Action]:
    ahead = min(num_ranks - rank - 1, number)
    actions = [Action("F", rank, index) for index in range(ahead)]
    for index in range(number):
        if ahead + index < number:
            actions.append(Action("F", rank, ahead + index))
        actions.append(Action("B", rank, index))
    return actions


_UNITS: Final[Mapping[str, int]] = {"F": 1, "B": 2, "I": 1, "W": 1}


def _simulate_schedule(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> tuple[int, int]:
    """Return the units of work of all ranks, and the time at which the last rank finishes."""
    queues = [[action for action in order if action.kind in _UNITS] for order in orders]
    ended: dict[tuple[str, int, int], int] = {}
    free, busy = [0] * len(queues), 0
    while any(queues):
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            before = _actions_before(schedule, queue[0])
            if any(need not in ended for need in before):
                continue
            kind, stage, index = queue.pop(0)
            start = max([free[rank], *(ended[need] for need in before)])
            free[rank] = start + _UNITS[kind]
            busy += _UNITS[kind]
            ended["F" if kind == "F" else "W" if kind == "W" else "B", stage, index] = free[rank]
    return busy, max(free)


def _actions_before(schedule: Schedule, action: Action) -> list[tuple[str, int, int]]:
    """Return the actions that must have ended before an action begins."""
    kind, stage, index = action
    if kind == "F":
        return [("F", stage - 1, index)] if stage else []
    if kind == "W":
        return [("B", stage, index)]
    after = [("B", stage + 1, index)] if stage + 1 < schedule.num_stages else []
    return [("F", stage, index), *after]
