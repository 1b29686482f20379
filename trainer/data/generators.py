"""Generators of Python, NumPy and torch on the CPU: seeded, saved and restored together."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, Final

import torch

from ...strategies.torch_internals.tensors import find_generator_address

_NUM_WORDS: Final = 624
"""Words of a Mersenne Twister, which each of the three is; it also keeps the index of the next one."""
_WORDS: Final = 4 * _NUM_WORDS
_AT_END: Final = _NUM_WORDS.to_bytes(4, sys.byteorder)
"""The index at which new words are generated."""
_NO_NORMAL: Final = bytes(16)

_TORCH_HEAD: Final = 20
"""Bytes before torch's words: the seed, how many words are left, whether it is seeded, and the next one."""
_TORCH_TAIL: Final = 28
"""Bytes after them: the second halves of pairs of normals, kept for the next call."""

_TURN: Final = 833
"""Bytes by which the words of one generator are rotated against those of another, so that each draws a stream of its
own: a third of them, and not a whole number of words."""


class SavedState:
    """A saved state of the generators."""

    __slots__ = ("gauss", "normal", "numpy", "python", "torch", "twister")

    def __init__(self) -> None:
        self.python: Any = None
        self.torch: Any = None
        self.numpy: Any = None
        self.twister: object = None
        """The NumPy generator that was the global one."""
        self.normal: Any = None
        self.gauss: float | None = None


class Generators:
    """The global generators, used through their public functions."""

    __slots__ = ()

    def new_state(self) -> SavedState:
        """Return the current state."""
        state = SavedState()
        self.take(state)
        return state

    def take(self, state: SavedState) -> None:
        """Save the current state."""
        state.python, state.torch = random.getstate(), torch.default_generator.get_state()
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            state.twister, state.numpy = numpy.get_bit_generator(), numpy.get_state(legacy=False)

    def put(self, state: SavedState) -> None:
        """Restore a saved state."""
        random.setstate(state.python)
        torch.default_generator.set_state(state.torch)
        if state.twister is not None:
            numpy = sys.modules["numpy"].random
            numpy.set_bit_generator(state.twister)
            numpy.set_state(state.numpy)

    def differ(self, state: SavedState, other: SavedState) -> bool:
        """Return whether something was drawn between two states."""
        now = self.new_state()
        public = []
        for saved in (state, other):  # memory may differ where nothing is drawn from
            self.put(saved)
            numpy = (
                _arrays_to_lists(sys.modules["numpy"].random.get_state(legacy=False))
                if "numpy" in sys.modules
                else None
            )
            public.append((random.getstate(), torch.default_generator.get_state().tolist(), numpy))
        self.put(now)
        return public[0] != public[1]

    def follow(self, state: SavedState, now: SavedState, before: SavedState) -> None:
        """Put into a state those generators that are no longer as they were."""
        if now.python != before.python:
            state.python, state.gauss = now.python, now.gauss
        if bytes(now.torch) != bytes(before.torch):
            state.torch = now.torch
        if _arrays_to_lists(now.numpy) != _arrays_to_lists(before.numpy):
            state.twister, state.numpy, state.normal = now.twister, now.numpy, now.normal

    def seed(self, seed: int) -> None:
        """Seed each library; Python's and NumPy's generators get the words that torch makes of the seed, rotated."""
        cpu = torch.default_generator.manual_seed(seed).get_state()
        words = struct.pack(f"={_NUM_WORDS}I", *cpu[24 : 24 + 2 * _WORDS].view(torch.int64).tolist())
        one, two = (struct.unpack(f"={_NUM_WORDS}I", words[by:] + words[:by]) for by in (_TURN, 2 * _TURN))
        random.setstate((3, (*two, _NUM_WORDS), None))
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            if type(numpy.get_bit_generator()) is not numpy.MT19937:
                numpy.set_bit_generator(numpy.MT19937(0))
            numpy.set_state(("MT19937", one, _NUM_WORDS, 0, 0.0))


def _arrays_to_lists(state: Any) -> Any:
    """Return a state of NumPy's with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _arrays_to_lists(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "dtype") else state


class MappedGenerators(Generators):
    """The global generators, used directly in memory: a copy takes 0.1 us, public functions take 0.3 to 70 us.

    Raises:
        LookupError: if one does not have the expected memory layout.
    """

    __slots__ = ("_cpu", "_numpy", "_python", "_python_index", "_python_words", "_random", "_torch", "_words")

    def __init__(self) -> None:
        self._random: Any = random.random.__self__  # type: ignore[attr-defined] # whose methods the functions are
        self._cpu: Any = torch.default_generator
        self._python, self._torch = _python_memory(self._random), _torch_memory(self._cpu)
        self._python_index = self._python[:4]
        self._python_words = _split_memory(self._python[4:], _WORDS - 2 * _TURN)
        words = self._torch[_TORCH_HEAD : _TORCH_HEAD + _WORDS]
        self._words = words[_TURN:], words[:_TURN], words[2 * _TURN :], words[: 2 * _TURN]
        self._numpy = _NumPy() if "numpy" in sys.modules else None

    def new_state(self) -> SavedState:
        state = SavedState()
        state.python, state.torch, state.numpy, state.normal = (
            memoryview(bytearray(size)) for size in (len(self._python), len(self._torch), _WORDS + 4, len(_NO_NORMAL))
        )
        self.take(state)
        return state

    def take(self, state: SavedState) -> None:
        state.python[:], state.gauss = self._python, self._random.gauss_next
        state.torch[:] = self._torch
        numpy = self._numpy
        if numpy is not None:
            if numpy.current() is not numpy.twister:
                numpy.look_again()
            state.twister = numpy.twister
            state.numpy[:], state.normal[:] = numpy.memory, numpy.normal

    def put(self, state: SavedState) -> None:
        self._python[:], self._random.gauss_next = state.python, state.gauss
        self._torch[:] = state.torch
        numpy = self._numpy
        if numpy is not None:
            if numpy.twister is not state.twister or numpy.current() is not state.twister:
                numpy.install(state.twister)
            numpy.memory[:], numpy.normal[:] = state.numpy, state.normal

    def seed(self, seed: int) -> None:
        self._cpu.manual_seed(seed)
        one, one_rest, two, two_rest = self._words
        first, last = self._python_words
        first[:], last[:], self._python_index[:], self._random.gauss_next = two, two_rest, _AT_END, None
        numpy = self._numpy
        if numpy is not None:
            if numpy.current() is not numpy.twister or numpy.is_foreign:
                numpy.look_again()
                if numpy.is_foreign:
                    numpy.install(numpy.own)
            numpy.first[:], numpy.last[:], numpy.index[:], numpy.normal[:] = one, one_rest, _AT_END, _NO_NORMAL


class _NumPy:
    """The memory of the generator behind NumPy's global functions; scratch memory if it is not a Mersenne Twister."""

    __slots__ = ("current", "first", "index", "is_foreign", "last", "memory", "normal", "own", "twister")

    def __init__(self) -> None:
        numpy = sys.modules["numpy"].random
        self.current = numpy.get_bit_generator
        self.own = numpy.MT19937(0)
        """Used for the data if training draws from another kind of generator."""
        self.normal = _normal_memory(numpy.random.__self__)
        self.look_again()

    def look_again(self) -> None:
        """Update to the current global generator."""
        self.twister = self.current()
        self.is_foreign = type(self.twister) is not type(self.own)
        scratch = memoryview(bytearray(_WORDS + 4))
        self.memory = scratch if self.is_foreign else _memory_at(self.twister.ctypes.state_address, _WORDS + 4)
        self.first, self.last = _split_memory(self.memory[:_WORDS], _WORDS - _TURN)
        self.index = self.memory[_WORDS:]

    def install(self, twister: object) -> None:
        """Make a generator the global one."""
        sys.modules["numpy"].random.set_bit_generator(twister)
        self.look_again()


def _split_memory(memory: memoryview, at: int) -> tuple[memoryview, memoryview]:
    return memory[:at], memory[at:]


def _memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _python_memory(generator: random.Random) -> memoryview:
    """Return the memory of a generator: after the object's header, the index and the words."""
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < object.__basicsize__ + _WORDS + 4:
        raise LookupError("Python's generator")
    memory = _memory_at(id(generator) + object.__basicsize__, _WORDS + 4)
    *words, index = generator.getstate()[1]
    if list(memory.cast("I")) != [index, *words]:
        raise LookupError("Python's generator")
    return memory


def _normal_memory(functions: Any) -> memoryview:
    """Return the memory in which NumPy's functions keep the second half of a pair of normals, and whether they do."""
    numpy = sys.modules["numpy"].random
    probe = numpy.RandomState(numpy.MT19937(0))
    probe.standard_normal()
    kept = struct.pack("=i4xd", 1, probe.get_state()[4])
    memory = _memory_at(id(probe), type(probe).__basicsize__)
    start = bytes(memory).find(kept[8:]) - 8
    if start < 0 or memory[start : start + 4] != kept[:4] or type(functions) is not type(probe):
        raise LookupError("NumPy's generator")
    memory[start : start + 16] = _NO_NORMAL
    if probe.get_state()[3:] != (0, 0.0):
        raise LookupError("NumPy's generator")
    return _memory_at(id(functions) + start, 16)


def _torch_memory(generator: torch.Generator) -> memoryview:
    """Return the memory of a generator: its seed, the index of the next word, the words, and kept normals."""
    seed = 2**40 + 1
    probes = [torch.Generator().manual_seed(seed), torch.Generator()]
    addresses = [find_generator_address(each) for each in (*probes, generator)]
    if not all(addresses):
        raise LookupError("torch's generator")
    start = bytes(_memory_at(addresses[0], 128)).find(struct.pack("=Qi?", seed, 1, True))
    if start < 0:
        raise LookupError("torch's generator")
    memory, other, own = (_memory_at(address + start, _TORCH_HEAD + _WORDS + _TORCH_TAIL) for address in addresses)
    for draw in (torch.rand, torch.randn):  # randn keeps a normal
        draw(1, generator=probes[0], dtype=torch.float64)
        other[:] = memory
        if not torch.equal(probes[0].get_state(), probes[1].get_state()):
            raise LookupError("torch's generator")
    return own


def _make_generators() -> Generators:
    try:
        return MappedGenerators()
    except (LookupError, AttributeError):
        return Generators()


GENERATORS: Final = _make_generators()
