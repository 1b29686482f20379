"""State of a learning rate schedule, with that of the schedules that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from ...common.errors import CheckpointError
from ...strategies.state.schema import format_as_line

_CODE: Final = (FunctionType, BuiltinFunctionType, MethodType)


def schedule_state(scheduler: Any) -> dict[str, object]:
    """Return a scheduler's state as values that a checkpoint can hold.

    Schedules inside it are replaced by their own states. Functions are left out: the schedule keeps those that it was
    built with, as torch's LambdaLR does.
    """
    state: dict[str, object] = scheduler.state_dict()
    return {key: _nested_state(value) for key, value in state.items() if not isinstance(value, _CODE)}


def _nested_state(value: Any) -> object:
    if _is_schedule(value):
        return schedule_state(value)
    if type(value) in (list, tuple):
        return type(value)(_nested_state(item) for item in value)
    return {key: _nested_state(item) for key, item in value.items()} if type(value) is dict else value


def load_schedule(scheduler: Any, state: Mapping[str, object]) -> None:
    """Load what `schedule_state` returned, also into the schedules inside it.

    Raises:
        CheckpointError: if a schedule is not where one was saved.
    """
    scheduler.load_state_dict(_put_schedules_back(state, scheduler.state_dict(), type(scheduler).__name__))


def _put_schedules_back(state: Mapping[str, object], live: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a saved state with the schedules of a `live` one in their places, after these have loaded their own."""
    return {key: _put_back(value, live.get(key), f"{key} of {name}") for key, value in state.items()}


def _put_back(saved: Any, live: Any, place: str) -> object:
    if _is_schedule(live):
        if not isinstance(saved, Mapping) or not saved.keys() & live.state_dict().keys():
            raise CheckpointError(
                f"{place} is a {type(live).__name__}, the saved one was {format_as_line(saved)}; configure the "
                "schedule as it was saved."
            )
        load_schedule(live, saved)
        return live
    if not holds_schedules(live):
        return saved
    if type(saved) is not type(live) or len(saved) != len(live):
        raise CheckpointError(
            f"{place} holds schedules, {format_as_line(live)}, the saved one had {format_as_line(saved)}; configure "
            "the schedule as it was saved."
        )
    if type(live) is dict:
        return {key: _put_back(value, live.get(key), f"{place}[{key!r}]") for key, value in saved.items()}
    return type(live)(_put_back(one, mine, place) for one, mine in zip(saved, live, strict=True))


def holds_schedules(value: Any) -> bool:
    """Return whether a value of a schedule's state is a schedule, or a list, tuple or dict with one inside."""
    if type(value) in (list, tuple, dict):
        return any(map(holds_schedules, value.values() if type(value) is dict else value))
    return _is_schedule(value)


def _is_schedule(value: object) -> bool:
    is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return is_stateful and hasattr(value, "optimizer") and callable(getattr(value, "step", None))
