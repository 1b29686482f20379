"""Profiles of a module for a plan: without and with activation checkpointing, of whole and of halved micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...callbacks.callback import Callback
from ...common.errors import ConfigError
from ...strategies import ActivationCheckpointing
from ...strategies.estimate.profile import Profile
from ..module.train_module import TrainModule
from .plan import Profiles, Recomputed
from .profiling import ProfilingStrategy, take_profile

if TYPE_CHECKING:
    from ...strategies.torch_internals.fake_tensors import FakeTensorMode

FitOnce = Callable[[ProfilingStrategy, Callback, ActivationCheckpointing | None], None]
"""Trains the module with a strategy, a callback and a setting of activation checkpointing."""


class LazyProfiles(Mapping[Recomputed, Profile]):
    """Profiles by what is recomputed, each taken when it is first asked for.

    Args:
        take: takes the profile for a key.
        keys: the keys that exist.
    """

    def __init__(self, take: Callable[[Recomputed], Profile], *keys: Recomputed) -> None:
        self._take, self._keys = take, keys
        self._taken: dict[Recomputed, Profile] = {}

    def __getitem__(self, recomputes: Recomputed) -> Profile:
        if recomputes not in self._keys:
            raise KeyError(recomputes)
        if recomputes not in self._taken:
            self._taken[recomputes] = self._take(recomputes)
        return self._taken[recomputes]

    def __contains__(self, recomputes: object) -> bool:
        return recomputes in self._keys

    def __iter__(self) -> Iterator[Recomputed]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def take_profiles(
    fit: FitOnce,
    module: TrainModule,
    *,
    given: ActivationCheckpointing | None = None,
    measures: bool = False,
    mode: FakeTensorMode | None = None,
) -> Profiles:
    """Return the profiles of a module's step; those after the first are taken when they are asked for.

    Args:
        fit: trains the module.
        module: see `take_profile`.
        given: the user's setting of activation checkpointing, the only one then where activations are recomputed.
        measures: see `ProfilingStrategy`.
        mode: see `ProfilingStrategy`.
    """
    strategy = ProfilingStrategy(measures=measures, mode=mode)
    if not measures:
        mode = strategy.mode
    first = take_profile(lambda strategy, callback: fit(strategy, callback, None), module, strategy)
    settings = _possible_settings(given, module)

    def take(num_samples: int | None, recomputes: Recomputed) -> Profile:
        if num_samples is None and not recomputes:
            return first
        strategy = ProfilingStrategy(num_samples=num_samples, measures=measures, mode=mode, updates=False)
        setting = settings[recomputes]
        profile = take_profile(lambda strategy, callback: fit(strategy, callback, setting), module, strategy)
        return replace(
            profile,
            state=first.state,
            update_bytes=first.update_bytes,
            # an optimizer that evaluates the loss itself does so only in an update
            num_backwards=first.num_backwards,
            flops=profile.flops // profile.num_backwards * first.num_backwards,
            work=profile.work.times(first.num_backwards / profile.num_backwards),
            work_of_update=first.work_of_update,
        )

    keys, half = tuple(settings), first.num_samples // 2
    return Profiles(
        whole=LazyProfiles(partial(take, None), *keys),
        halved=LazyProfiles(partial(take, half), *(keys if half else ())),
        can_accumulate=module.automatic_optimization,
    )


def _possible_settings(
    given: ActivationCheckpointing | None, module: TrainModule
) -> dict[Recomputed, ActivationCheckpointing | None]:
    """Return the settings to choose from, those that compute the least again first."""
    settings: dict[Recomputed, ActivationCheckpointing | None] = {"": None}
    if given is not None:
        possible: dict[Recomputed, ActivationCheckpointing] = {given.mode or "full": given}
    else:
        possible = {mode: ActivationCheckpointing(mode=mode) for mode in ("selective", "full")}
    for mode, setting in possible.items():
        with suppress(ConfigError):  # there is nothing whose activations could be computed again
            setting.submodules(module)
            settings[mode] = setting
    return settings
