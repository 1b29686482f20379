"""Seeds and states of the random generators of a process."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ...common.errors import ConfigError
from ...strategies.devices.generators import device_generators
from ...strategies.module.random_streams import RandomStreams
from .generators import GENERATORS

_LARGEST_SEED: Final = 2**32 - 1
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_OF_DEVICES: Final = 0x64657669
"""Keeps the seeds of devices apart from those of ranks and epochs."""
_OF_RANKS: Final = 0x72616E6B
"""Keeps the seeds of ranks apart from those of epochs."""

_log = logging.getLogger(__name__)


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (of every device) and return the seed.

    Args:
        seed: the seed; None means 0.
        workers: accepted for Lightning; it has no effect, since workers of loaders are always seeded.
        verbose: log the seed.

    Raises:
        ConfigError: for a seed that is not an integer from 0 to 4294967295, the range that NumPy takes.

    Example::

        seed_everything(42)
        Trainer(max_epochs=1, deterministic=True).fit(Net(), train_loader)
    """
    if seed is None:
        seed = 0
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _LARGEST_SEED:
        raise ConfigError(
            f"seed must be an integer from 0 to {_LARGEST_SEED} (None means 0), got seed={seed!r}; choose another."
        )
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ImportError:  # torch runs without NumPy
        pass
    else:
        np.random.seed(seed)
    if verbose:
        _log.info("Seed set to %d", seed)
    return seed


def derive_seed(seed: int, *keys: int) -> int:
    """Return a well-mixed 64-bit seed for a place in a run, such as (epoch, index), the same on every machine."""
    mixed = mix_seed(0, seed)
    for key in keys:
        mixed = mix_seed(mixed, key)
    return mixed


def mix_seed(mixed: int, key: int) -> int:
    """Return a seed made from another seed and a key: the finalizer of SplitMix64 (Steele et al. 2014).

    Neighboring keys give unrelated seeds. ``mix(derive(a, b), c)`` is ``derive(a, b, c)``.
    """
    return mix_bits(mixed + key + 0x9E3779B97F4A7C15)


def mix_bits(number: int) -> int:
    """Return a number of 64 bits, each of which depends on all of the last 64 bits of an integer."""
    mixed = number & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def capture_rng(devices: Iterable[torch.device] = ()) -> dict[str, object]:
    """Return the state of every generator of this process and of these devices, as tensors and JSON values.

    NumPy's is included only if NumPy was imported.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, object] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    if on_devices := device_generators(devices):
        state["devices"] = [generator.get_state() for generator in on_devices]
    return state


def restore_rng(state: Mapping[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Restore the generators to what `capture_rng` saw, except those of missing libraries and devices.

    The states of devices are matched by their place among the devices of the process, not by their index on the
    machine.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    # clone: torch reads a state with aligned instructions and crashes on a view into a file (torch 2.14)
    torch.set_rng_state(state["torch"].cpu().clone())
    if "numpy" in state:
        _set_numpy_state(state["numpy"])
    for generator, saved in zip(device_generators(devices), state.get("devices", ()), strict=False):
        generator.set_state(saved.cpu().clone())


@contextmanager
def isolated_rng(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the CPU generators, and those of these devices, on exit, regardless of what is drawn or seeded inside."""
    streams = RandomStreams(devices)
    try:
        yield
    finally:
        streams.rewind()


def seed_devices(devices: Iterable[torch.device], seed: int, data_rank: int) -> None:
    """Seed the generators of this process's devices from the run's seed and the rank, each differently."""
    for place, generator in enumerate(device_generators(devices)):
        generator.manual_seed(derive_seed(seed, _OF_DEVICES, data_rank, place))


def part_ranks(devices: Iterable[torch.device], seed: int, data_rank: int) -> None:
    """Give each data rank its own random numbers, for dropout; rank 0 has those of a run with one process."""
    if data_rank:
        seed_generators(derive_seed(seed, _OF_RANKS, data_rank))
    seed_devices(devices, seed, data_rank)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of this process or worker with 64 bits, in 2 us."""
    GENERATORS.seed(seed)


class RngStream:
    """A separate stream of random numbers, from a seed: code inside ``with stream:`` draws only from it."""

    __slots__ = ("_outside", "_own")

    def __init__(self, seed: int) -> None:
        self._outside = GENERATORS.new_state()
        GENERATORS.seed(seed)
        self._own = GENERATORS.new_state()
        GENERATORS.put(self._outside)

    def __enter__(self) -> None:
        GENERATORS.take(self._outside)
        GENERATORS.put(self._own)

    def __exit__(self, *error: object) -> None:
        GENERATORS.take(self._own)
        GENERATORS.put(self._outside)


def _numpy_state() -> dict[str, object]:
    name, key, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return {
        "generator": str(name),
        "state": torch.tensor(key.tolist(), dtype=torch.int64),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _set_numpy_state(state: Mapping[str, Any]) -> None:
    try:
        import numpy as np
    except ImportError:
        return
    key = np.asarray(state["state"].tolist(), dtype=np.uint32)
    np.random.set_state((state["generator"], key, state["position"], state["has_gauss"], state["gauss"]))
