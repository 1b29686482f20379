"""A nested structure as what travels: a few flat tensors, and the bytes of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import RunError
from . import pickling
from .nested import map_tensors, named_leaves
from .tensor_collectives import as_bytes

# Joining tensors saves the latency of a collective each and costs a copy: nothing for small ones, as in DDP's buckets
_LARGE: Final = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel as one."""

    indices: list[int]
    widths: list[int]
    flat: Tensor

    def split(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield, by index, the columns of each tensor; `flat` has one or more lines of all of them."""
        lines = flat.reshape(-1, sum(self.widths))
        for index, part in zip(self.indices, lines.split(self.widths, dim=1), strict=True):
            # of its own memory: a part that is saved would bring the whole bucket into the file
            yield index, part.clone() if len(self.indices) > 1 else part


def join(tensors: Sequence[Tensor], num_lines: int = 1, *, by_gradient: bool = False) -> Iterator[Bucket]:
    """Copy tensors into few flat ones: the small ones of one dtype and kind of device together, large ones alone.

    Args:
        tensors: of any shapes.
        num_lines: into how many equal parts, one after another, every tensor is cut; the parts of the first come first.
        by_gradient: whether those that require a gradient are kept apart. Not where ranks may differ in it.
    """
    found: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device.type, by_gradient and tensor.requires_grad)
        is_large = tensor.numel() * tensor.element_size() > _LARGE
        found.setdefault((*key, index if is_large else None), []).append(index)
    for indices in found.values():
        widths = [tensors[index].numel() // num_lines for index in indices]
        lines = [tensors[index].reshape(num_lines, width) for index, width in zip(indices, widths, strict=True)]
        yield Bucket(indices, widths, torch.cat(lines, dim=1).reshape(-1))


def joined(tensors: Sequence[Tensor], run: Callable[[Tensor], Tensor], **options: Any) -> list[Tensor]:
    """Return, for every tensor, its columns of what `run` made of the flat tensors of `join`; it may overwrite them."""
    results = list(tensors)
    for bucket in join(tensors, **options):
        for index, part in bucket.split(run(bucket.flat)) if bucket.flat.numel() else ():
            results[index] = part
    return results


class TensorSlot:
    """What is left in a structure where a tensor was; no dataclass, as those are walked."""

    def __init__(self, tensor: Tensor, *, requires_grad: bool, holds_content: bool) -> None:
        self.shape, self.dtype, self.is_cpu = tensor.shape, tensor.dtype, tensor.device.type == "cpu"
        self.requires_grad = requires_grad
        # torch's own pickling knows no float8 (2.14), and would put a tensor on the GPU that the sender's is on
        self._content = as_bytes(tensor.detach().cpu().reshape(-1)).numpy().tobytes() if holds_content else b""

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into, on `device` if the sender's was not on its CPU."""
        place = torch.device("cpu") if self.is_cpu else device
        return torch.empty(self.shape, dtype=self.dtype, device=place, requires_grad=self.requires_grad)

    def read(self, device: torch.device) -> Tensor:
        """Return the tensor, of which the content is here."""
        tensor = self.empty(device)
        if self._content:
            content = torch.frombuffer(bytearray(self._content), dtype=torch.uint8)
            as_bytes(tensor.reshape(-1)).copy_(content)
        return tensor


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


@dataclass(frozen=True)
class Parcel:
    """A nested structure in two parts: its tensors, and bytes.

    What cannot be sent is an error on every rank: the bytes then hold the error, so that nobody waits in vain.
    """

    payload: bytes
    skeleton: Any = None
    tensors: Sequence[Tensor] = ()
    error: Exception | None = None

    def check(self) -> None:
        """Raise the error that kept the structure from being packed; called when the bytes are on their way."""
        if self.error is not None:
            raise self.error


def pack(data: Any, rank: int, *, keeps_gradients: bool = False, is_whole: bool = False) -> Parcel:
    """Return a structure ready to be sent by `rank`; with `is_whole`, its tensors are among the bytes."""
    tensors: list[Tensor] = []
    keeps_gradients = keeps_gradients and torch.is_grad_enabled()

    def take(tensor: Tensor) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor  # sparse ones and subclasses go with the bytes, too
        tensors.append(tensor if keeps_gradients else tensor.detach())
        return TensorSlot(tensor, requires_grad=keeps_gradients and tensor.requires_grad, holds_content=is_whole)

    try:
        skeleton = map_tensors(take, data)
        return Parcel(pickling.pack(skeleton, "data"), skeleton, tensors)
    except Exception as error:  # noqa: BLE001 - of whatever __reduce__ or __post_init__ the user's classes have
        return refuse(
            RunError(
                f"Rank {rank} cannot send {type(data).__name__}: {error} Give tensors, numbers, strings and structures "
                "of them, or what else can be pickled."
            )
        )


def refuse(error: Exception) -> Parcel:
    """Return what is sent in place of a structure, for receivers to raise."""
    return Parcel(pickling.pack(_Failure(str(error))), error=error)


def unpack(payload: bytes) -> Any:
    """Return the skeleton that bytes of a `Parcel` hold.

    Raises:
        RunError: if the sender could not pack it.
    """
    skeleton = pickling.unpack(payload)
    if isinstance(skeleton, _Failure):
        raise RunError(f"Nothing was received; see what the sender says: {skeleton.text}")
    return skeleton


def slots(skeleton: Any) -> list[TensorSlot]:
    """Return where tensors belong, in order."""
    return [leaf for _, leaf in named_leaves(skeleton) if isinstance(leaf, TensorSlot)]


def fill(skeleton: Any, columns: Sequence[Tensor]) -> Any:
    """Return the structure with its tensors, which come in any shape, at their places."""
    new = iter(columns)
    return map_tensors(
        lambda tensor: tensor,
        skeleton,
        lambda leaf: next(new).reshape(leaf.shape) if isinstance(leaf, TensorSlot) else leaf,
    )
