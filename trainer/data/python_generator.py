"""PythonGenerator: the generator of Python's `random` module, saved and restored in a tenth of a microsecond."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, Final

_NUM_WORDS: Final = 624
"""Of the Mersenne Twister: its state is as many 32-bit words, and the index of the next one."""
_SIZE: Final = 4 * (_NUM_WORDS + 1)

_MARK: Final = 16
"""Bytes that differ between any two states that occur: the index and three words, which drawing and seeding change."""

_AT_END: Final = _NUM_WORDS.to_bytes(4, sys.byteorder)
"""The index after which the words are made again."""

State = tuple[Any, float | None]
"""The memory (or, where that is not known, what `random.getstate` returns), and the normal that is kept for later."""


class PythonGenerator:
    """Copies the memory of the generator in place of `random.getstate`, which builds a tuple of 625 numbers in 8 us.

    CPython keeps the index and the words one after the other, behind the head of the object. That is looked at once; an
    interpreter that keeps them otherwise is served by the public functions.
    """

    def __init__(self) -> None:
        self._generator: Any = random.seed.__self__  # type: ignore[attr-defined] # whose methods the functions are
        self._memory = _memory_of(self._generator) if _is_laid_out_as_known() else None
        if self._memory is not None:
            middle = 4 + 2 * _NUM_WORDS
            self._index, self._first, self._second = self._memory[:4], self._memory[4:middle], self._memory[middle:]
        self._twister: Any = None
        self._halves = memoryview(b""), memoryview(b"")

    def get_state(self) -> State:
        """Return the state as it is now."""
        if self._memory is None:
            return random.getstate(), None
        return bytes(self._memory), self._generator.gauss_next

    def updated(self, state: State) -> State:
        """Return the state as it is now; `state` itself if it is still that one, which its first words tell."""
        if self._memory is not None and self._memory[:_MARK] == state[0][:_MARK]:
            return state
        return self.get_state()

    def set_state(self, state: State) -> None:
        """Put a state back."""
        if self._memory is None:
            random.setstate(state[0])
        else:
            self._memory[:], self._generator.gauss_next = state

    def state_after(self, seed: int) -> State:
        """Return the state that `seed` makes."""
        before = self.get_state()
        random.seed(seed)
        state = self.get_state()
        self.set_state(before)
        return state

    def seed(self, seed: int, twister: Any = None) -> None:
        """Seed with 64 bits; faster beside a twister of NumPy's, an ``MT19937`` that has just been seeded.

        Half of what seeding costs is filling the words. NumPy's are taken over, turned by half: another state, whose
        numbers are not those of NumPy.
        """
        if self._memory is None or type(twister).__name__ != "MT19937":
            random.seed(seed)
            return
        if twister is not self._twister:
            array = (ctypes.c_char * (4 * _NUM_WORDS)).from_address(twister.ctypes.state_address)
            words = memoryview(array).cast("B")
            self._twister, self._halves = twister, (words[: 2 * _NUM_WORDS], words[2 * _NUM_WORDS :])
        self._first[:], self._second[:] = self._halves[1], self._halves[0]
        self._index[:] = _AT_END
        self._generator.gauss_next = None


def _memory_of(generator: Any) -> memoryview:
    array = (ctypes.c_char * _SIZE).from_address(id(generator) + object.__basicsize__)
    return memoryview(array).cast("B")


def _is_laid_out_as_known() -> bool:
    """Return whether the memory of a generator holds its index and its words."""
    if sys.implementation.name != "cpython":
        return False
    probe = random.Random(0)
    if type(probe).__basicsize__ < object.__basicsize__ + _SIZE:
        return False
    *words, index = probe.getstate()[1]
    return list(_memory_of(probe).cast("I")) == [index, *words]


PYTHON_GENERATOR: Final = PythonGenerator()
