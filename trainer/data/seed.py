"""Seeds and states of the random generators of a process."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ...strategies.errors import ConfigError
from .python_generator import PYTHON_GENERATOR

_LARGEST_SEED: Final = 2**32 - 1
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF

_log = logging.getLogger(__name__)


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (of every device) and return the seed; None means 0.

    ``workers`` is Lightning's and changes nothing here: workers of loaders are always seeded.

    Raises:
        ConfigError: for a seed that is not an integer from 0 to 4294967295, the range that NumPy takes.
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


def derive(seed: int, *keys: int) -> int:
    """Return a 64-bit seed for a place in a run, such as (epoch, index): the same on every machine, well mixed."""
    mixed = mix(0, seed)
    for key in keys:
        mixed = mix(mixed, key)
    return mixed


def mix(mixed: int, key: int) -> int:
    """Return a seed made of another one and a key: the finaliser of SplitMix64 (Steele et al. 2014).

    Neighbouring keys share no bits. ``mix(derive(a, b), c)`` is ``derive(a, b, c)``.
    """
    mixed = (mixed + key + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator of this process, as tensors and JSON values.

    NumPy's is there only if something imported it, CUDA's only if something used it.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back to what `capture_rng` saw; those of absent libraries and devices are left out."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    # clone: torch reads a state with aligned instructions and crashes on a view into a file (torch 2.14)
    torch.set_rng_state(state["torch"].cpu().clone())
    if "numpy" in state:
        _set_numpy_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu().clone(), device)


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore the CPU generators on exit, whatever is drawn or seeded inside.

    Costs about 85 us, 70 of them for NumPy's generator: reading its state faster would lose a cached normal.
    """
    python, cpu = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(cpu)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of this process or worker with 64 bits, quickly; NumPy's if something imported it."""
    torch.default_generator.manual_seed(seed)
    if "numpy" not in sys.modules:
        random.seed(seed)
        return
    numpy = sys.modules["numpy"].random
    numpy.seed(seed & _LARGEST_SEED)
    PYTHON_GENERATOR.seed(seed, numpy.get_bit_generator())


class PreservedGenerators:
    """Leaves the CPU generators as they are, whatever is drawn or seeded inside ``with``; not to be nested.

    Costs about 3 us a time, against 85 for `isolated_rng`: NumPy's generator is exchanged, not copied. That forgets
    the second half of a pair of normals that ``np.random.randn`` keeps for its next call.
    """

    def __init__(self) -> None:
        self._python = PYTHON_GENERATOR.get_state()
        self._torch: Any = None
        self._numpy: Any = None
        self._numpy_outside: Any = None

    def __enter__(self) -> None:
        self._python = PYTHON_GENERATOR.updated(self._python)
        self._torch = torch.default_generator.get_state()
        self._numpy_outside = None
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            self._numpy_outside = numpy.get_bit_generator()
            self._numpy = self._numpy or numpy.MT19937(0)
            numpy.set_bit_generator(self._numpy)

    def __exit__(self, *error: object) -> None:
        PYTHON_GENERATOR.set_state(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy_outside is not None:
            sys.modules["numpy"].random.set_bit_generator(self._numpy_outside)


PRESERVED_GENERATORS: Final = PreservedGenerators()


class RngStream(PreservedGenerators):
    """A stream of random numbers of its own, begun by a seed: what runs inside ``with stream:`` draws from it alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._own_python = PYTHON_GENERATOR.state_after(seed)
        self._own_torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = sys.modules["numpy"].random.MT19937(seed) if "numpy" in sys.modules else None

    def __enter__(self) -> None:
        super().__enter__()
        PYTHON_GENERATOR.set_state(self._own_python)
        torch.default_generator.set_state(self._own_torch)

    def __exit__(self, *error: object) -> None:
        self._own_python = PYTHON_GENERATOR.updated(self._own_python)
        self._own_torch = torch.default_generator.get_state()
        super().__exit__(*error)


def _numpy_state() -> dict[str, Any]:
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
