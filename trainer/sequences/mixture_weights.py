"""Weights of a mixture: checked, raised to a temperature, and as they change with the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...common.errors import ConfigError, did_you_mean
from .mixed_source import MixedSource

Named = Mapping[str, float]
Phases = Sequence[tuple[int, Named]] | Callable[[int], Named]
"""Weights from a position on; or a function from a position to weights."""


def weights_of(
    sources: Mapping[str, Any], read: Sequence[MixedSource], temperature: float, *, is_scheduled: bool
) -> list[float] | None:
    """Return the weights that are given with the sources, or their sizes; None if a schedule gives them.

    Raises:
        ConfigError: for impossible ones, and for both.
    """
    given = [isinstance(each, tuple) for each in sources.values()]
    if not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        raise ConfigError(f"temperature must be above 0, got {temperature!r}; 1.0 leaves weights as they are.")
    if is_scheduled:
        if any(given) or temperature != 1.0:
            raise ConfigError(
                f"A schedule gives the weights, got weights for {sum(given)} sources and temperature={temperature}; "
                "pass {name: data set} with it."
            )
        return None
    if any(given) != all(given):
        names = [name for name, is_given in zip(sources, given, strict=True) if not is_given]
        raise ConfigError(f"All sources must have weights, or none, got none for {', '.join(names)}; add them.")
    if not any(given):
        unknown = [source.name for source in read if source.size is None]
        if unknown:
            raise ConfigError(f"The stream {unknown[0]!r} has no size to weigh it by; give all sources weights.")
        weights = [(source.size or 0) * source.mean_length for source in read]
    else:
        weights = [_check_weight(name, value[1]) for name, value in sources.items()]
        for name, weight in zip(sources, weights, strict=True):
            if weight == 0:
                raise ConfigError(f"The weight of {name!r} must be above 0, got {weight}; leave the source out.")
    return [weight ** (1 / temperature) for weight in weights]


def phases_of(
    names: Sequence[str], weights: Sequence[float] | None, schedule: Phases | None, means: Sequence[float]
) -> tuple[list[tuple[int, list[float]]], Callable[[int], list[float]] | None]:
    """Return shares of samples from positions on, and a function of the position if that gives them.

    Args:
        names: the sources.
        weights: those that do not change.
        schedule: those that do.
        means: what weights are divided by: the mean length of a sample, or 1.

    Raises:
        ConfigError: for an impossible schedule.
    """
    if schedule is None:
        assert weights is not None
        return [(0, _divide_by_means(weights, means))], None
    if callable(schedule):
        weigh = ScheduledWeights(schedule, names, means)
        return [(0, weigh(0))], weigh
    if isinstance(schedule, str | Mapping) or not isinstance(schedule, Sequence) or not schedule:
        raise ConfigError(
            f"schedule must be [(from_sample, {{name: weight}}), ...] or a function, got {schedule!r:.60}; give one."
        )
    phases: list[tuple[int, list[float]]] = []
    for number, phase in enumerate(schedule):
        if not isinstance(phase, tuple | list) or len(phase) != 2 or type(phase[0]) is not int:
            raise ConfigError(
                f"schedule[{number}] must be (from_sample, {{name: weight}}), got {phase!r:.60}; give a number of "
                "samples and weights."
            )
        start, named = phase
        if start != 0 if not phases else start <= phases[-1][0]:
            raise ConfigError(
                f"schedule[{number}] must begin {'at 0' if not phases else f'after {phases[-1][0]}'}, got {start}; "
                "sort the phases, the first from sample 0 on."
            )
        phases.append((start, _divide_by_means(_weights_by_name(named, names, f"schedule[{number}]"), means)))
    return phases, None


class ScheduledWeights:
    """The shares that a user's function of the position gives."""

    def __init__(self, schedule: Callable[[int], Named], names: Sequence[str], means: Sequence[float]) -> None:
        self._schedule, self._names, self._means = schedule, names, means

    def __call__(self, position: int) -> list[float]:
        return _divide_by_means(
            _weights_by_name(self._schedule(position), self._names, f"schedule({position})"), self._means
        )


def _weights_by_name(named: object, names: Sequence[str], what: str) -> list[float]:
    if not isinstance(named, Mapping):
        raise ConfigError(f"{what} must be {{name: weight}}, got {named!r:.60}; name each source.")
    for name in named:
        if name not in names:
            raise ConfigError(
                f"{what} names {name!r}, but the sources are {', '.join(names)}.{did_you_mean(str(name), names)}"
            )
    missing = [name for name in names if name not in named]
    if missing:
        raise ConfigError(f"{what} has no weight for {', '.join(missing)}, got {dict(named)!r:.60}; 0 leaves one out.")
    weights = [_check_weight(name, named[name]) for name in names]
    if not any(weights):
        raise ConfigError(f"{what} must have a weight above 0, got {dict(named)!r:.60}; give one.")
    return weights


def _check_weight(name: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ConfigError(f"The weight of {name!r} must be a number from 0 on, got {weight!r}; give its share.")
    return float(weight)


def _divide_by_means(weights: Sequence[float], means: Sequence[float]) -> list[float]:
    return [weight / mean for weight, mean in zip(weights, means, strict=True)]
