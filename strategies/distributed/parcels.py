"""Parcels in which nested structures of any kind are sent: tensors as tensors, everything else as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from ...common.errors import RunError
from . import pickling
from .nested import map_tensors, named_leaves
from .tensor_collectives import as_bytes

_SMALL: Final = 1 << 13  # bytes: the state of a random number generator, but not of many layers


class TensorSlot:
    """Placeholder of a tensor in a structure; not a dataclass, because those are traversed."""

    def __init__(self, tensor: Tensor, *, requires_grad: bool, holds_content: bool) -> None:
        self.shape, self.dtype, self.is_cpu = tensor.shape, tensor.dtype, tensor.device.type == "cpu"
        self.requires_grad = requires_grad
        # torch's own pickling does not support float8 (2.14), and would restore a tensor on the sender's GPU
        self._content = _content_of(tensor.detach().cpu()) if holds_content else b""
        self.is_sent = holds_content
        """Whether the tensor travels in the slot."""

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into, on `device` unless the sender's was on the CPU."""
        place = torch.device("cpu") if self.is_cpu else device
        return torch.empty(self.shape, dtype=self.dtype, device=place, requires_grad=self.requires_grad)

    def read(self, device: torch.device) -> Tensor:
        """Return the tensor, if the slot holds its content."""
        tensor = self.empty(device)
        if self._content:
            content = torch.frombuffer(bytearray(self._content), dtype=torch.uint8)
            as_bytes(tensor.reshape(-1)).copy_(content)
        return tensor


def _content_of(tensor: Tensor) -> bytes:
    return as_bytes(tensor.resolve_conj().resolve_neg().reshape(-1)).numpy().tobytes()


class _SendError:
    """Message in place of a structure that could not be sent."""

    def __init__(self, text: str) -> None:
        self.text = text


@dataclass(frozen=True)
class Parcel:
    """Nested structure in two parts: a pickled skeleton with slots, and the tensors of the slots that hold none.

    A structure that cannot be pickled is an error on every rank: the bytes then hold the error, so that no rank waits
    forever.
    """

    payload: bytes
    skeleton: object = None
    tensors: Sequence[Tensor] = ()
    error: Exception | None = None

    @classmethod
    def pack(cls, data: object, rank: int, *, keeps_gradients: bool = False, is_whole: bool = False) -> Self:
        """Return a structure ready to be sent by `rank`; with `is_whole`, the bytes include its tensors.

        Without, they still include small ones on the CPU for which no gradient comes back: a collective costs more.
        """
        tensors: list[Tensor] = []
        keeps_gradients = keeps_gradients and torch.is_grad_enabled()

        def take(tensor: Tensor) -> Any:
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
                return tensor  # sparse tensors and subclasses are pickled with the rest
            needs_grad = keeps_gradients and tensor.requires_grad
            is_small = tensor.is_cpu and not needs_grad and tensor.nbytes <= _SMALL
            if not (is_whole or is_small):
                tensors.append(tensor if keeps_gradients else tensor.detach())
            return TensorSlot(tensor, requires_grad=needs_grad, holds_content=is_whole or is_small)

        try:
            skeleton = map_tensors(take, data)
            return cls(pickling.pack_value(skeleton, "data"), skeleton, tensors)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ or __post_init__ may raise anything
            return cls.refuse(
                RunError(
                    f"Rank {rank} cannot send {type(data).__name__}: {error} Give tensors, numbers, strings and "
                    "structures of them, or other objects that can be pickled."
                )
            )

    @classmethod
    def refuse(cls, error: Exception) -> Self:
        """Return a parcel that raises an error when it is unpacked."""
        return cls(pickling.pack_value(_SendError(str(error))), error=error)

    def raise_if_refused(self) -> None:
        """Raise the error that prevented packing, if any; call this once the bytes are sent."""
        if self.error is not None:
            raise self.error


def unpack_skeleton(payload: bytes) -> Any:
    """Return the skeleton of a parcel from its bytes.

    Raises:
        RunError: if the sender could not pack the structure.
    """
    skeleton = pickling.unpack_value(payload)
    if isinstance(skeleton, _SendError):
        raise RunError(f"Nothing was received; see the error of the sender: {skeleton.text}")
    return skeleton


def list_slots(skeleton: object) -> list[TensorSlot]:
    """Return the slots of a skeleton whose tensors are sent on their own, in order."""
    return [leaf for _, leaf in named_leaves(skeleton) if isinstance(leaf, TensorSlot) and not leaf.is_sent]


def fill_slots(skeleton: object, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Return the structure with a tensor in each slot: the one that it holds, or the next of `tensors` in its shape.

    A tensor that a slot holds is put on `device`, unless the sender's was on the CPU.
    """
    new = iter(tensors)

    def put(leaf: object) -> object:
        if not isinstance(leaf, TensorSlot):
            return leaf
        return leaf.read(device) if leaf.is_sent else next(new).reshape(leaf.shape)

    return map_tensors(lambda tensor: tensor, skeleton, put)
