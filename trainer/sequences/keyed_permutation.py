"""KeyedPermutation: a random order of range(n) that is computed where it is read, and kept nowhere."""

from __future__ import annotations

from operator import index
from typing import Final, overload

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ..data.seed import derive_seed, mix_bits

_NUM_ROUNDS: Final = 10
"""As in NIST's FF1; four suffice in theory (Luby and Rackoff 1988) for large halves, but not for halves of few bits."""
_LARGEST: Final = 1 << 62
"""So that a position of two halves of 31 bits stays positive in 64."""
_FEW: Final = 32
"""Positions up to which numbers are faster than tensors, each of whose 130 operations takes a microsecond."""


class KeyedPermutation:
    """The numbers from 0 to ``size - 1``, each once, in an order that the key determines.

    Any element, slice or tensor of positions is computed on its own: reading needs memory for what is read, and
    none for the rest. A balanced Feistel network permutes the next power of four; numbers outside of the range are
    permuted again until they are inside ("cycle walking", Black and Rogaway 2002, Ciphers with Arbitrary Finite
    Domains). That takes fewer than four passes on average, and more only for fewer than 16 numbers. The round
    function is the finalizer of SplitMix64 (Steele et al. 2014). This is no encryption.

    Args:
        size: the number of elements, up to 2 ** 62.
        key: integers that choose the order, such as a seed and an epoch.

    Raises:
        ConfigError: for a size outside of that range.

    Example::

        from echelon.trainer.sequences.keyed_permutation import KeyedPermutation

        order = KeyedPermutation(10**12, 0, 3)  # a seed and an epoch
        assert order[7] in range(10**12)
        first_of_each_rank = order[0:4096:8]  # a tensor
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 0 <= size <= _LARGEST:
            raise ConfigError(f"size must be from 0 to 2 ** 62, got {size}; give the number of samples.")
        self._size = size
        # halves of two bits are too regular: the chi-square of the orders of 5 elements was 8 deviations from its mean
        self._half_bits = max(3, -(-max(0, size - 1).bit_length() // 2))
        seed = derive_seed(0, *key)
        self._round_keys = [_to_signed(derive_seed(seed, number)) for number in range(_NUM_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, positions: int) -> int: ...

    @overload
    def __getitem__(self, positions: slice | Tensor) -> Tensor: ...

    def __getitem__(self, positions: int | slice | Tensor) -> int | Tensor:
        """Return the element at a position, or a tensor of those at several; negative ones count from the end.

        Raises:
            IndexError: for a position outside.
        """
        if isinstance(positions, slice):
            start, stop, step = positions.indices(self._size)
            if len(range(start, stop, step)) == 0:
                return torch.empty(0, dtype=torch.int64)
            return self._at(torch.arange(start, stop, step))
        if isinstance(positions, Tensor):
            positions = positions.to(torch.int64)
            positions = torch.where(positions < 0, positions + self._size, positions)
            if bool(((positions < 0) | (positions >= self._size)).any()):
                raise IndexError(f"positions must be below {self._size}, got up to {int(positions.max())}")
            return self._at(positions)
        position = index(positions)
        if not -self._size <= position < self._size:
            raise IndexError(f"position must be below {self._size}, got {position}")
        return self._one(position % self._size)

    def _at(self, positions: Tensor) -> Tensor:
        if positions.numel() <= _FEW:
            found = [self._one(position) for position in positions.flatten().tolist()]
            return torch.tensor(found, dtype=torch.int64, device=positions.device).view(positions.shape)
        values = self._permuted(positions)
        flat = values.view(-1)
        outside = (flat >= self._size).nonzero().flatten()
        while len(outside):
            walked = self._permuted(flat[outside])
            flat[outside] = walked
            outside = outside[walked >= self._size]
        return values

    def _one(self, value: int) -> int:
        """Return the element at a position, as `_at` does with tensors."""
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        while True:
            left, right = value >> bits, value & mask
            for key in self._round_keys:
                left, right = right, mix_bits(right + key) & mask ^ left
            value = left << bits | right
            if value < self._size:
                return value

    def _permuted(self, values: Tensor) -> Tensor:
        """Return the images of numbers below the power of four, in new memory."""
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        left, right = values >> bits, values & mask
        for key in self._round_keys:
            left, right = right, _hash_with_key(right, key).bitwise_and_(mask).bitwise_xor_(left)
        return (left << bits).bitwise_or_(right)


def _hash_with_key(values: Tensor, key: int) -> Tensor:
    """Return `mix_bits` of each number with the key; arithmetic in 64 bits wraps around."""
    mixed = values + key
    mixed ^= _shift_right(mixed, 30)
    mixed *= _FIRST
    mixed ^= _shift_right(mixed, 27)
    mixed *= _SECOND
    mixed ^= _shift_right(mixed, 31)
    return mixed


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Return numbers shifted to the right, with zeros in place of the sign that torch would repeat."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _to_signed(number: int) -> int:
    """Return the number of 64 bits with a sign that has the same bits."""
    return number - (1 << 64) if number >> 63 else number


_FIRST: Final = _to_signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _to_signed(0x94D049BB133111EB)
