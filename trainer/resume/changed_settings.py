"""Changed settings of optimizers and schedulers on resume: the saved or the configured ones are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal

from torch import Tensor
from torch.optim import Optimizer

from ...common.errors import CheckpointError
from ...strategies.state.optimizer_groups import Sources
from ...strategies.state.schema import NUMBER, check_schema, format_as_line
from .schedules import holds_schedules, load_schedule, schedule_state

Winner = Literal["saved", "configured"]

# values that change during a run, and so differ even if nobody configured them differently
_MOVED_BY_SCHEDULERS: Final = frozenset(["lr", "momentum", "betas"])
_MOVING: Final = frozenset(
    [
        *("T_cur", "T_i", "_is_initial", "_last_lr", "_step_count", "best", "cooldown_counter", "last_epoch"),
        *("num_bad_epochs", "_schedulers"),
    ]
)


_ITEM_A_GROUP: Final = frozenset(
    [
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "eta_mins", "base_momentums", "max_momentums"),
        *("_initial_lrs", "initial_lrs"),
    ]
)
_NO_ITEM_A_GROUP: Final = frozenset(["_milestones", "milestones", "_schedule_phases"])


def load_groups(
    optimizer: Optimizer, before: list[dict[str, object]], has_scheduler: bool, winner: Winner
) -> list[str]:
    """Resolve the differences between an optimizer's groups `before` its state was loaded and now.

    If a scheduler changes the learning rate, the initial rates are compared, and the current rate is scaled with them.

    Returns:
        A description of each difference, for the user.
    """
    differences, name = [], type(optimizer).__name__
    for index, (configured, saved) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        for key, value in configured.items():
            if key == "params" or (has_scheduler and key in _MOVED_BY_SCHEDULERS) or key not in saved:
                continue
            if saved[key] == value:
                continue
            differences.append(f"{name} group {index}: {key} saved {saved[key]!r}, configured {value!r}")
            if winner == "configured" and key == "initial_lr" and saved[key]:
                saved["lr"] = saved["lr"] * value / saved[key]
            if winner == "configured":
                saved[key] = value
    return differences


def load_scheduler(scheduler: Any, saved: Mapping[str, Any], winner: Winner, sources: Sources = ()) -> list[str]:
    """Load a scheduler's state, and resolve what was configured differently; return the differences as text.

    `sources` are the saved groups of its optimizer's groups, if those have changed.
    """
    live, before = scheduler.state_dict(), schedule_state(scheduler)
    _refuse_other_class(type(scheduler).__name__, before, saved)
    if sources:
        saved = _by_group(saved, before, sources, type(scheduler).__name__)
    state = {key: Counter(value) if isinstance(before.get(key), Counter) else value for key, value in saved.items()}
    for key, value in before.items():
        if key in state and isinstance(value, int | float) and not isinstance(value, bool):
            check_schema(state[key], (NUMBER, Tensor), f"{key} of {type(scheduler).__name__} in the checkpoint")
    differences = []
    for key, value in before.items():
        if key in _MOVING or key not in state or state[key] == value or holds_schedules(live[key]):
            continue
        if not key.startswith("_"):  # private attributes follow from public ones
            differences.append(f"{type(scheduler).__name__}: {key} saved {state[key]!r}, configured {value!r}")
        if winner == "configured":
            state[key] = value
    load_schedule(scheduler, state)
    return differences


def _refuse_other_class(name: str, live: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Refuse the state of a scheduler of another class: each has settings that the other lacks.

    Raises:
        CheckpointError: naming them.
    """
    of_live, of_saved = ({key for key in state if not key.startswith("_")} for state in (live, saved))
    if of_live - of_saved and of_saved - of_live:
        raise CheckpointError(
            f"The scheduler is {name} with {sorted(of_live - of_saved)}, but the checkpoint holds the state of one "
            f"with {sorted(of_saved - of_live)}; configure the scheduler as it was saved, or start a new fit from the "
            "weights (load_from_checkpoint, or echelon.load_weights)."
        )


def _by_group(saved: Mapping[str, Any], before: Mapping[str, object], sources: Sources, name: str) -> dict[str, object]:
    """Return a scheduler's saved state with its lists that have an item for each group in the order of the groups here.

    Raises:
        CheckpointError: for a list of which it is not known whether its items belong to groups.
    """
    number = len(saved.get("base_lrs", saved.get("min_lrs", ())))
    state = dict(saved)
    for key, value in saved.items():
        own = before.get(key)
        if key == "_schedulers" and isinstance(value, list) and isinstance(own, list) and len(own) == len(value):
            state[key] = [_by_group(one, mine, sources, name) for one, mine in zip(value, own, strict=True)]
        elif not isinstance(value, list | tuple) or key in _NO_ITEM_A_GROUP or len(value) != number:
            continue
        elif key in _ITEM_A_GROUP and isinstance(own, list | tuple) and len(own) == len(sources):
            state[key] = type(value)(
                mine if source is None else value[source] for mine, source in zip(own, sources, strict=True)
            )
        else:
            raise CheckpointError(
                f"The optimizer's groups are not in the order in which they were saved, and {key} of {name}, with "
                f"{number} items, got {format_as_line(value)}, may belong to them; configure the groups as they were "
                "saved, or load the weights only (echelon.load_weights)."
            )
    return state
