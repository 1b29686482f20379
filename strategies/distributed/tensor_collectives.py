"""Collectives on a single flat tensor, with their gradients, and on bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import distributed as dist

ReduceOp = Literal["sum", "mean", "min", "max"]
REDUCE_OPS: Final = ("sum", "mean", "min", "max")

_NUMBER: Final = 8  # bytes in which the length of a payload is sent
# The first bytes are sent with the length: most payloads then take one collective, where torch's functions for objects
# always take two. In a gather each rank sends them to all others.
_GATHERED_FIRST: Final = 1 << 6
_BROADCAST_FIRST: Final = 1 << 8


@dataclass(frozen=True)
class Wire:
    """A torch process group, and a function that is called before a backward runs a collective on it."""

    process_group: dist.ProcessGroup | None
    world_size: int
    rank: int
    announce: Callable[[str, Tensor], None]
    """Called by backward with the operation and the gradient; callers announce the forward themselves."""


# torch.distributed.nn.functional.all_gather gives wrong gradients on gloo (torch 2.14), and torch's functional
# collectives have no gradient for broadcast. All of these operations are linear, so their gradients are simple.


def all_reduce(wire: Wire, flat: Tensor, op: ReduceOp) -> Tensor:
    """Return the reduction of every rank's `flat`, which may be overwritten; sum and mean are differentiable."""
    import torch.distributed as dist

    if op in ("sum", "mean"):
        total: Tensor = _Linear.apply(wire, flat, "all_reduce") if _has_gradient(flat) else _sum_over_ranks(wire, flat)
        return total / wire.world_size if op == "mean" else total
    flat = flat.detach()
    dist.all_reduce(flat, dist.ReduceOp.MIN if op == "min" else dist.ReduceOp.MAX, wire.process_group)
    return flat


def begin_all_reduce(wire: Wire, flat: Tensor, op: ReduceOp) -> Callable[[], list[float]]:
    """Start to reduce every rank's `flat`, and return a function that waits for the result."""
    import torch.distributed as dist

    kinds = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    work = dist.all_reduce(flat, kinds.get(op, dist.ReduceOp.SUM), wire.process_group, async_op=True)

    def end() -> list[float]:
        work.wait()
        return (flat / wire.world_size if op == "mean" else flat).tolist()

    return end


def all_gather(wire: Wire, flat: Tensor) -> Tensor:
    """Return every rank's `flat`, concatenated."""
    return _Linear.apply(wire, flat, "all_gather") if _has_gradient(flat) else _all_gather(wire, flat)


def reduce_scatter(wire: Wire, flat: Tensor, op: ReduceOp) -> Tensor:
    """Return this rank's slice of the reduction of every rank's `flat`; sum and mean are differentiable."""
    if op in ("min", "max"):
        return all_reduce(wire, flat, op).chunk(wire.world_size)[wire.rank].clone()
    own: Tensor = _Linear.apply(wire, flat, "reduce_scatter") if _has_gradient(flat) else _reduce_scatter(wire, flat)
    return own / wire.world_size if op == "mean" else own


def all_to_all(wire: Wire, flat: Tensor) -> Tensor:
    """Return this rank's slice of every rank's `flat`, concatenated; all have the same length, cut in equal slices."""
    return _Linear.apply(wire, flat, "all_to_all") if _has_gradient(flat) else _all_to_all(wire, flat)


def broadcast(wire: Wire, flat: Tensor, src: int) -> Tensor:
    """Return rank `src`'s `flat`; others pass a tensor of the same shape, dtype and requires_grad."""
    import torch.distributed as dist

    if _has_gradient(flat):
        return _Broadcast.apply(wire, flat, src)  # type: ignore[no-any-return]
    dist.broadcast(as_bytes(flat), group=wire.process_group, group_src=src)
    return flat.detach()


def all_to_all_of(wire: Wire, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Return the slices of every rank's `flat` that are for this rank; given how long the slices of all ranks are."""
    if not _has_gradient(flat):
        return _exchange_parts(wire, flat, sent, received)
    exchanged: Tensor = _Uneven.apply(wire, flat, sent, received)
    return exchanged


def all_gather_bytes(wire: Wire, payload: bytes) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    heads = _all_gather(wire, _make_head(payload, _GATHERED_FIRST)).view(wire.world_size, -1)
    lengths, room = [_read_length(head) for head in heads], _GATHERED_FIRST - _NUMBER
    firsts = [_to_bytes(head[_NUMBER:]) for head in heads]
    if (longest := max(lengths)) > room:
        rests = _all_gather(wire, _pad_bytes(payload[room:], longest - room)).view(wire.world_size, -1)
        firsts = [first + _to_bytes(rest) for first, rest in zip(firsts, rests, strict=True)]
    return [first[:length] for first, length in zip(firsts, lengths, strict=True)]


def broadcast_bytes(wire: Wire, payload: bytes, src: int) -> bytes:
    """Return rank `src`'s bytes; others may pass any."""
    import torch.distributed as dist

    is_source = wire.rank == src
    head = _make_head(payload, _BROADCAST_FIRST) if is_source else torch.empty(_BROADCAST_FIRST, dtype=torch.uint8)
    dist.broadcast(head, group=wire.process_group, group_src=src)
    length, room = _read_length(head), _BROADCAST_FIRST - _NUMBER
    if length <= room:
        return payload if is_source else _to_bytes(head[_NUMBER : _NUMBER + length])
    rest = _pad_bytes(payload[room:], length - room) if is_source else torch.empty(length - room, dtype=torch.uint8)
    dist.broadcast(rest, group=wire.process_group, group_src=src)
    return payload if is_source else _to_bytes(head[_NUMBER:]) + _to_bytes(rest)


def _make_head(payload: bytes, size: int) -> Tensor:
    return _pad_bytes(len(payload).to_bytes(_NUMBER, "little") + payload[: size - _NUMBER], size)


def _pad_bytes(content: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def _read_length(head: Tensor) -> int:
    return int.from_bytes(_to_bytes(head[:_NUMBER]), "little")


def _to_bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view as bytes, to transfer dtypes that gloo does not support, such as int16 and float8."""
    return flat.detach().view(torch.uint8)


def _has_gradient(flat: Tensor) -> bool:
    return flat.requires_grad and torch.is_grad_enabled()


def _sum_over_ranks(wire: Wire, flat: Tensor) -> Tensor:
    import torch.distributed as dist

    flat = flat.detach()
    dist.all_reduce(flat, group=wire.process_group)
    return flat


def _all_gather(wire: Wire, flat: Tensor) -> Tensor:
    import torch.distributed as dist

    gathered = flat.new_empty(wire.world_size * flat.numel())
    # its name before torch 2.13
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(as_bytes(gathered), as_bytes(flat), group=wire.process_group)
    return gathered


def _reduce_scatter(wire: Wire, flat: Tensor) -> Tensor:
    import torch.distributed as dist

    own = flat.new_empty(flat.numel() // wire.world_size)
    # its name before torch 2.13
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(own, flat.detach(), group=wire.process_group)
    return own


def _all_to_all(wire: Wire, flat: Tensor) -> Tensor:
    import torch.distributed as dist

    own = torch.empty_like(flat)
    dist.all_to_all_single(as_bytes(own), as_bytes(flat), group=wire.process_group)
    return own


def _exchange_parts(wire: Wire, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    import torch.distributed as dist

    own, size = flat.new_empty(sum(received)), flat.element_size()
    in_bytes = ([size * number for number in received], [size * number for number in sent])
    dist.all_to_all_single(as_bytes(own), as_bytes(flat), *in_bytes, group=wire.process_group)
    return own


class _Uneven(torch.autograd.Function):
    """An exchange of slices of different lengths; its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.wire, ctx.sent, ctx.received = wire, sent, received
        return _exchange_parts(wire, flat, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.wire.announce("backward of all_to_all", gradient)
        return None, all_to_all_of(ctx.wire, gradient.contiguous(), ctx.received, ctx.sent), None, None


class _Linear(torch.autograd.Function):
    """A collective from the table below; its backward is its transpose."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, flat: Tensor, name: _Name) -> Tensor:
        ctx.wire, ctx.name = wire, name
        return _RUN[name](wire, flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.wire.announce(f"backward of {ctx.name}", gradient)
        return None, _Linear.apply(ctx.wire, gradient.contiguous(), _TRANSPOSES[ctx.name]), None


_Name = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_RUN: Final[dict[_Name, Callable[[Wire, Tensor], Tensor]]] = {
    "all_reduce": lambda wire, flat: _sum_over_ranks(wire, flat.clone()),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
_TRANSPOSES: Final[dict[_Name, _Name]] = {
    "all_reduce": "all_reduce",  # every rank's output depends on every rank's input
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


class _Broadcast(torch.autograd.Function):
    """Broadcast; its backward sums the gradients of all ranks on rank `src`."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, flat: Tensor, src: int) -> Tensor:
        import torch.distributed as dist

        ctx.wire, ctx.src = wire, src
        copy = flat.detach().clone()
        dist.broadcast(as_bytes(copy), group=wire.process_group, group_src=src)
        return copy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        import torch.distributed as dist

        ctx.wire.announce("backward of broadcast", gradient)
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.reduce(gradient, group=ctx.wire.process_group, group_dst=ctx.src)
        return None, gradient if ctx.wire.rank == ctx.src else None, None
