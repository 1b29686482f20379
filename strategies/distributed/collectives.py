"""Collectives and transfers of nested structures between the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor

from ...common.errors import ConfigError, EchelonError, RunError, did_you_mean
from . import tensor_collectives
from .buckets import Reducible, map_joined
from .call_record import CallRecord
from .call_watch import note_call
from .debug import Aspect, CollectiveChecks, PostedCall, call_here, checked_transfer
from .parcels import Parcel, fill_slots, list_slots, unpack_skeleton
from .point_to_point import Mailbox, PendingTransfer
from .process_group import ProcessGroup
from .tensor_collectives import REDUCE_OPS, ReduceOp, Wire

if TYPE_CHECKING:
    from torch import distributed as dist

T = TypeVar("T")

_CHECK_TIMEOUT: Final = timedelta(minutes=2)


class Collectives:
    """torch's collectives for nested structures: mappings, lists, tuples and dataclasses of tensors and numbers.

    Inputs are never modified, and results do not share memory with them. Small tensors of the same dtype are sent
    together. CPU tensors are sent over gloo, whatever the backend is. `all_reduce` and `reduce_scatter` with sum or
    mean, `all_gather` and `broadcast` are differentiable; their backward is collective, too: every rank must run it.

    Args:
        group: the process group; None for a single process, in which all collectives are the identity.
        device: where received tensors are put, unless the sender's were on the CPU.
    """

    is_fake: ClassVar[bool] = False
    """Whether the other ranks do not exist, in torch's fake process group; what depends on values is then skipped."""

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._checks: CollectiveChecks | None = None
        self._record = None if group is None else CallRecord.of_this_process()
        self.rank, self.world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self._group, self.device = group, device
        self._has_group = self.world_size > 1
        if group is None or not self._has_group:
            return
        self._cpu_group = group.cpu_group
        self._cpu_wire = Wire(group.cpu_group, self.world_size, self.rank, self._announce_backward)
        self._wire = Wire(group.device_group, self.world_size, self.rank, self._announce_backward)
        self._mailbox = Mailbox(group.cpu_group, device)
        if group.settings.get("check_collectives"):
            timeout = group.settings.get("timeout", _CHECK_TIMEOUT)
            self._checks = CollectiveChecks(group.store, group.ranks[self.rank], group.ranks, timeout)

    def over(self, ranks: Sequence[int]) -> Collectives:
        """Return the collectives of a subset of these ranks, which are numbered from 0 there. Collective.

        Args:
            ranks: this rank and others; each of them passes the same ones. For all ranks, the result is this object;
                for a single rank, all collectives are the identity.

        Raises:
            ConfigError: on every rank, if one does not include itself, or if two subsets overlap without being equal.
        """
        if self._group is None:
            return self
        parts = self.all_gather_object(tuple(sorted(ranks)))
        for rank, part in enumerate(parts):
            if rank not in part or any(parts[member] != part for member in part if 0 <= member < len(parts)):
                raise ConfigError(
                    "over(ranks) must get a set of ranks that includes the calling one, the same on each of them, got "
                    f"{part} on rank {rank} of {parts}; pass the parts of a partition."
                )
        if parts[self.rank] == tuple(range(self.world_size)):
            return self
        members = [[self._group.ranks[rank] for rank in part] for part in dict.fromkeys(parts)]
        return Collectives(self._group.among(members), self.device)

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of these collectives."""
        return (0,) if self._group is None else self._group.ranks

    @property
    def process_group(self) -> ProcessGroup | None:
        """The process group, in whose store ranks can meet without a collective; None in a single process."""
        return self._group

    @property
    def spans_nodes(self) -> bool:
        """Whether the processes of the run are on several nodes, whose disks may be different ones."""
        return self._group is not None and len(set(self._group.nodes)) > 1

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """Torch's process group of these ranks, for libraries that take one; None means the default group."""
        return None if self._group is None else self._group.device_group

    # --- every rank passes the same structure -------------------------------------------------------------------------

    def all_reduce(self, data: object, op: ReduceOp = "sum") -> Any:
        """Reduce every tensor and number over all ranks. Collective.

        Numbers are returned as numbers: integers are exact up to 64 bits, other numbers and every mean are float64.
        Sum and mean are differentiable. Dictionaries may have their keys in any order; other leaves are returned as is.

        Raises:
            ConfigError: for another `op`, or for the mean of an integer tensor.
        """
        if not self._has_group:
            return data
        _check_op(op)
        self._announce(f"all_reduce({op})", data)
        own = Reducible(data, op)
        reduced = map_joined(own.tensors, lambda flat: tensor_collectives.all_reduce(self._wire_of(flat), flat, op))
        return own.replaced(reduced, [tensor.shape for tensor in own.tensors])

    def begin_all_reduce(self, numbers: Sequence[float], op: ReduceOp) -> Callable[[], list[float]]:
        """Start to reduce numbers over all ranks; the returned function waits for the result. Collective."""
        if not self._has_group:
            return lambda: list(numbers)
        self._announce(f"all_reduce({op})", list(numbers))
        return tensor_collectives.begin_all_reduce(self._cpu_wire, torch.tensor(numbers, dtype=torch.float64), op)

    def all_gather(self, data: object) -> Any:
        """Stack every tensor over the ranks, along a new first dimension of size world_size. Collective.

        A number becomes a tensor of that length. Differentiable. A single process returns `data` unchanged.
        """
        if not self._has_group:
            return data
        self._announce("all_gather", data)
        own = Reducible(data)
        gathered = map_joined(own.tensors, lambda flat: tensor_collectives.all_gather(self._wire_of(flat), flat))
        return own.replaced(gathered, [(self.world_size, *tensor.shape) for tensor in own.tensors])

    def reduce_scatter(self, data: object, op: ReduceOp = "sum") -> Any:
        """Reduce every tensor over all ranks and return this rank's slice of the first dimension. Collective.

        Sum and mean are differentiable.

        Raises:
            ConfigError: for another `op`, or for a leaf whose first dimension is not divisible by world_size.
        """
        if not self._has_group:
            return data
        _check_op(op)
        self._announce(f"reduce_scatter({op})", data)
        own = Reducible(data, op)
        shapes = [self._slice_shape(name, tensor) for name, tensor in zip(own.names, own.tensors, strict=True)]
        slices = map_joined(
            own.tensors,
            lambda flat: tensor_collectives.reduce_scatter(self._wire_of(flat), flat, op),
            num_rows=self.world_size,
        )
        return own.replaced(slices, shapes)

    def _slice_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        if tensor.ndim == 0 or tensor.shape[0] % self.world_size:
            raise ConfigError(
                f"The first dimension of {name or 'data'} must be divisible by world_size={self.world_size} for "
                f"reduce_scatter, got shape {list(tensor.shape)}; pad it to a multiple, or use all_reduce."
            )
        return tensor.shape[0] // self.world_size, *tensor.shape[1:]

    # --- one rank sends, or receives --------------------------------------------------------------------------------

    def broadcast(self, data: object, src: int = 0) -> Any:
        """Return rank `src`'s data, of any kind, on every rank; others may pass None. Collective.

        Tensors arrive on the receiver's device; CPU tensors stay on the CPU. Differentiable.

        Raises:
            RunError: on every rank, if `src` cannot pickle its data.
        """
        self._check_rank("src", src)
        if not self._has_group:
            return data
        self._announce(f"broadcast(src={src})", data, compared=("name",))
        parcel = Parcel.pack(data if self.rank == src else None, self.rank, keeps_gradients=True)
        payload = tensor_collectives.broadcast_bytes(self._cpu_wire, parcel.payload, src)
        parcel.raise_if_refused()
        skeleton = parcel.skeleton if self.rank == src else unpack_skeleton(payload)
        tensors = parcel.tensors if self.rank == src else [slot.empty(self.device) for slot in list_slots(skeleton)]
        sent = map_joined(
            tensors, lambda flat: tensor_collectives.broadcast(self._wire_of(flat), flat, src), by_gradient=True
        )
        return fill_slots(skeleton, sent, self.device)

    def on_first_rank(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank. Collective.

        Raises:
            EchelonError: on every rank, if it was raised on rank 0.
        """
        result: tuple[T | None, EchelonError | None] = (None, None)
        if self.rank == 0:
            try:
                result = (function(), None)
            except EchelonError as error:
                result = (None, error)
        value, failure = self.broadcast(result)
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Synchronize after a block in which each rank works independently, for example on its disk. Collective.

        Raises:
            EchelonError: on every rank, if the block raised one on any rank.
        """
        own: EchelonError | None = None
        try:
            yield
        except EchelonError as error:
            own = error
        errors = self.all_gather_object(own)
        if own is not None:
            raise own
        for rank, other in enumerate(errors):
            if other is not None:
                raise type(other)(f"{other} This happened on rank {rank} of {self.world_size}; look at its node.")

    def scatter(self, data: Sequence[object] | None, src: int = 0) -> Any:
        """Return, on each rank, its element of the list that rank `src` passes; others may pass None. Collective.

        The elements may be of any kind and differ in structure. Not differentiable.

        Raises:
            ConfigError: on `src`, if `data` does not have one element per rank; a `RunError` on the others.
            RunError: on every rank, if an element cannot be pickled.
        """
        self._check_rank("src", src)
        if not self._has_group:
            return self._elements(data, src)[0]
        self._announce(f"scatter(src={src})", data, compared=("name",))
        if self.rank != src:
            return self._mailbox.receive(src)
        others = [rank for rank in range(self.world_size) if rank != src]
        try:
            elements = self._elements(data, src)
            parcels = [Parcel.pack(elements[rank], self.rank) for rank in others]
            for parcel in parcels:
                parcel.raise_if_refused()
        except EchelonError as error:
            self._send_all(others, [Parcel.refuse(error)] * len(others))
            raise
        self._send_all(others, parcels)
        return elements[src]

    def _elements(self, data: Sequence[object] | None, src: int) -> Sequence[object]:
        if isinstance(data, Sequence) and len(data) == self.world_size:
            return data
        raise ConfigError(
            f"scatter(src={src}) must get a list with one element for each of {self.world_size} ranks, got "
            f"{type(data).__name__}{f' of length {len(data)}' if isinstance(data, Sequence) else ''}; pass one there."
        )

    def _send_all(self, ranks: Sequence[int], parcels: Sequence[Parcel]) -> None:
        for transfer in [self._mailbox.send(parcel, rank) for rank, parcel in zip(ranks, parcels, strict=True)]:
            transfer.wait()

    def gather(self, data: object, dst: int = 0) -> list[Any] | None:
        """Return, on rank `dst`, the list of all ranks' data, in rank order; None on the others. Collective.

        The data may be of any kind and differ in structure. Not differentiable, unlike `all_gather`.
        """
        self._check_rank("dst", dst)
        if not self._has_group:
            return [data]
        self._announce(f"gather(dst={dst})", data, compared=("name",))
        if self.rank != dst:
            parcel = Parcel.pack(data, self.rank)
            self._mailbox.send(parcel, dst).wait()
            parcel.raise_if_refused()
            return None
        return [data if rank == dst else self._mailbox.receive(rank) for rank in range(self.world_size)]

    def all_gather_object(self, data: object) -> list[Any]:
        """Return the list of all ranks' data, of any kind, in rank order. Collective.

        Raises:
            RunError: on every rank, if one cannot pickle its data.
        """
        if self._has_group:
            self._announce("all_gather_object", None)
        return self.exchange(data)

    def exchange(self, data: object) -> list[Any]:
        """Return what `all_gather_object` does, from ranks whose code calls it in different places. Collective."""
        if not self._has_group:
            return [data]
        parcel = Parcel.pack(data, self.rank, is_whole=True)
        payloads = tensor_collectives.all_gather_bytes(self._cpu_wire, parcel.payload)
        parcel.raise_if_refused()
        return [fill_slots(unpack_skeleton(payload), (), self.device) for payload in payloads]

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this. Collective; a `name` is accepted for Lightning."""
        if not self._has_group:
            return
        import torch.distributed as dist

        self._announce("barrier", None, compared=("name",))
        dist.barrier(group=self._cpu_group)

    # --- two ranks ---------------------------------------------------------------------------------------------------

    def send(self, data: object, dst: int) -> None:
        """Send data of any kind to rank `dst`, and wait until it is sent. Not differentiable."""
        self.isend(data, dst).wait()

    def recv(self, src: int) -> Any:
        """Wait for the data that rank `src` sends next to this rank, and return it."""
        posted = self._announce_transfer("recv", None, src, self.rank)
        if posted is not None:
            posted.check()
        return self._mailbox.receive(src)

    def isend(self, data: object, dst: int) -> PendingTransfer:
        """Start to send data of any kind to rank `dst`; it may be modified at once. ``wait()`` ends the transfer."""
        posted = self._announce_transfer("send", data, self.rank, dst)
        parcel = Parcel.pack(data, self.rank)
        transfer = self._mailbox.send(parcel, dst)
        parcel.raise_if_refused()
        return checked_transfer(posted, transfer)

    def irecv(self, src: int) -> PendingTransfer:
        """Start to receive what rank `src` sends next; ``wait()`` returns it."""
        posted = self._announce_transfer("recv", None, src, self.rank)
        return checked_transfer(posted, self._mailbox.begin_receive(src))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wire_of(self, flat: Tensor) -> Wire:
        return self._cpu_wire if flat.is_cpu else self._wire

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"{name}={rank!r} must be a rank from 0 to {self.world_size - 1}; choose one of them.")

    def _announce(self, name: str, data: object, compared: Sequence[Aspect] = ("name", "shapes", "where")) -> None:
        if self._record is not None:
            self._record.note(name)
        if self._checks is not None:
            note_call(self.ranks)
            self._checks.check(call_here(name, data, compared))

    def _announce_backward(self, name: str, gradient: Tensor) -> None:
        self._announce(name, gradient, ("name", "shapes"))

    def _announce_transfer(self, name: str, data: object, src: int, dst: int) -> PostedCall | None:
        if not self._has_group:
            raise RunError(
                f"{name}(src={src}, dst={dst}) needs a second rank, but this run has one process; "
                "call it only where strategy.world_size > 1."
            )
        self._check_rank("src", src)
        self._check_rank("dst", dst)
        if src == dst:
            raise ConfigError(f"{name} must name another rank, got this rank, {src}; choose one of the others.")
        if self._checks is None:
            return None
        assert self._group is not None
        ranks = self._group.ranks[src], self._group.ranks[dst]
        return self._checks.post(call_here(f"{name}(src={src}, dst={dst})", data, ()), f"{src}-{dst}", ranks)


def _check_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ConfigError(f"op={op!r} is not a reduction.{did_you_mean(str(op), REDUCE_OPS)}")
