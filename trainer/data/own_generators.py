"""Random generators of their own that objects of a user's hold, such as samplers: found, saved and restored."""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from .seed import derive_seed

_LARGEST: Final = 256
"""Items of a list or dict among which to look; one of generators holds one for each class, say, not for each sample."""
_DEPTH: Final = 3
"""How many samplers may wrap each other."""


class OwnGenerators:
    """The generators that a sampler holds in its attributes, or in those of the samplers and objects in them.

    States are tensors and text, so that reading them back runs no code. The global generators are not among them, nor
    those of a data set.
    """

    def __init__(self, generators: Iterable[object]) -> None:
        self._generators = list(generators)

    @classmethod
    def of(cls, sampler: object) -> Self:
        """Return those of a sampler, in the order of its attributes."""
        found: dict[int, object] = {}
        for generator in _found_in(sampler, _DEPTH):
            found.setdefault(id(generator), generator)
        return cls(found.values())

    def __len__(self) -> int:
        return len(self._generators)

    def states(self) -> list[object]:
        """Return the state of each."""
        return [_state_of(generator) for generator in self._generators]

    def follow_first(self, share: Callable[[object], Any] | None) -> None:
        """Take the states of the first rank's, if `share` returns what it has. Collective then."""
        if share is not None and self._generators:
            self.put(share(self.states()))

    def put(self, states: Sequence[object]) -> None:
        """Restore states of the same generators; leave those alone that have none."""
        for generator, state in zip(self._generators, states, strict=False):
            _set_generator_state(generator, state)

    def seed_from(self, states: Sequence[Any]) -> None:
        """Seed each generator from an earlier state of it, on every machine in the same way."""
        for place, (generator, state) in enumerate(zip(self._generators, states, strict=True)):
            content = bytes(state.tolist()) if isinstance(state, torch.Tensor) else state.encode()
            _seed_generator(generator, derive_seed(zlib.crc32(content), place))


def _found_in(holder: object, depth: int) -> Iterator[object]:
    attributes = getattr(holder, "__dict__", {})
    if not isinstance(attributes, Mapping):
        return
    for name, item in [(name, item) for name, value in attributes.items() for item in _list_items(value)]:
        # the attribute that torch's samplers have is seeded for each epoch, like the global generators
        is_seeded = depth == _DEPTH and name == "generator" and isinstance(item, torch.Generator)
        if _is_generator(item) and not is_seeded:
            yield item
        elif depth and _may_hold(item):
            yield from _found_in(item, depth - 1 if isinstance(item, Sampler) or "sampler" in name else 0)


def _list_items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _LARGEST else ()
    if isinstance(value, list | tuple):
        return value if len(value) <= _LARGEST else ()
    return (value,)


def _may_hold(value: object) -> bool:
    """Return whether to look for generators in a value: not in data sets and modules, whose numbers are their own."""
    if isinstance(value, Dataset | nn.Module | torch.Tensor | type) or hasattr(value, "__array__"):
        return False
    return hasattr(value, "__dict__") and not callable(value)


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        # the class of the second draws from the operating system and has no state
        return value is not random.random.__self__ and not isinstance(value, random.SystemRandom)  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    kinds = numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator
    if not isinstance(value, kinds):
        return False
    from ...common.internals.numpy_generators import is_global_generator

    return not is_global_generator(value)


def _state_of(generator: object) -> object:
    """Return a state as a tensor if it is torch's, else as JSON, whose integers may have any size."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_numpy_state(generator), default=_array_to_json)


def _numpy_state(generator: Any) -> object:
    if hasattr(generator, "get_state"):  # a RandomState
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu().clone())
        return
    plain = json.loads(state)
    if isinstance(generator, random.Random):
        version, words, gauss = plain
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(_with_arrays(plain))
    else:
        getattr(generator, "bit_generator", generator).state = _with_arrays(plain)


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "set_state"):  # a RandomState, which also keeps the second half of a pair of normals
        from ...common.internals.numpy_generators import find_bit_generator

        kind = type(find_bit_generator(generator))
        generator.set_state(type(generator)(kind(seed)).get_state(legacy=False))
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state


def _array_to_json(value: Any) -> object:
    """Return a NumPy array or number for JSON."""
    listed = value.tolist()
    return {"array": listed, "dtype": str(value.dtype)} if isinstance(listed, list) else listed


def _with_arrays(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return sys.modules["numpy"].array(value["array"], dtype="uint64" if value["dtype"] == "uint64" else "uint32")
    return {name: _with_arrays(item) for name, item in value.items()}
