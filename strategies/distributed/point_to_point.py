"""Transfers of nested structures from one rank to another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from .buckets import join_in_buckets, map_joined
from .parcels import Parcel, fill_slots, list_slots, unpack_skeleton
from .tensor_collectives import as_bytes

if TYPE_CHECKING:
    from torch import distributed as dist

# torch's tags distinguish the transfers between two ranks; the user's own sends have tags from 0 on
_FIRST_TAG: Final = 1 << 20
_NUM_TAGS: Final = 1 << 20
_HOST: Final = torch.device("cpu")


class PendingTransfer(Protocol):
    """Transfer that `isend` or `irecv` has started."""

    def wait(self) -> object:
        """Wait until the transfer has finished, and return the received data."""


class Mailbox:
    """Sends and receives structures: first the number of bytes, then the bytes, then the tensors.

    GPU tensors pass through host memory: with NCCL, two ranks that each send first and then receive would deadlock as
    soon as the tensors are larger than its buffers.
    """

    def __init__(self, cpu_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._cpu_group = cpu_group
        self._device = device
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def send(self, parcel: Parcel, dst: int) -> PendingTransfer:
        """Start to send a parcel to rank `dst`."""
        import torch.distributed as dist

        tag = _next_tag(self._num_sent, dst)
        payload = torch.frombuffer(bytearray(parcel.payload), dtype=torch.uint8)
        flats = [torch.tensor([payload.numel()]), payload]
        flats += [
            bucket.flat
            for bucket in join_in_buckets([tensor.cpu() for tensor in parcel.tensors])
            if bucket.flat.numel()
        ]
        works = [dist.isend(as_bytes(flat), group=self._cpu_group, tag=tag, group_dst=dst) for flat in flats]
        return _Sending(works, flats)

    def receive(self, src: int) -> object:
        """Wait for the next structure from `src`."""
        return self._receive(src, _next_tag(self._num_received, src))

    def begin_receive(self, src: int) -> PendingTransfer:
        """Start to receive, in a thread: the number of bytes must arrive before the next receive can be posted."""
        tag = _next_tag(self._num_received, src)
        return _Receiving(lambda: self._receive(src, tag))

    def _receive(self, src: int, tag: int) -> object:
        size = self._fetch(torch.empty(1, dtype=torch.int64), src, tag)
        payload = self._fetch(torch.empty(int(size), dtype=torch.uint8), src, tag)
        skeleton = unpack_skeleton(payload.numpy().tobytes())
        places = list_slots(skeleton)
        received = map_joined([slot.empty(_HOST) for slot in places], lambda flat: self._fetch(flat, src, tag))
        return fill_slots(
            skeleton,
            [flat if slot.is_cpu else flat.to(self._device) for slot, flat in zip(places, received, strict=True)],
            self._device,
        )

    def _fetch(self, flat: Tensor, src: int, tag: int) -> Tensor:
        import torch.distributed as dist

        dist.recv(as_bytes(flat), group=self._cpu_group, tag=tag, group_src=src)
        return flat


def _next_tag(counter: Counter[int], peer: int) -> int:
    counter[peer] += 1
    return _FIRST_TAG + counter[peer] % _NUM_TAGS


class _Sending:
    def __init__(self, works: list[Any], flats: list[Tensor]) -> None:
        self._works = works
        self._flats = flats  # torch does not keep the tensors that it sends

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._flats.clear()


class _Receiving:
    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive = receive
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._has_thread = True
        try:
            threading.Thread(target=self._run, name="echelon irecv", daemon=True).start()
        except RuntimeError:  # the limit on processes and threads
            self._has_thread = False

    def _run(self) -> None:
        try:
            self._received = self._receive()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = error
        finally:
            self._has_ended.set()

    def wait(self) -> object:
        if not self._has_thread and not self._has_ended.is_set():
            self._run()
        # not Thread.join(): if a signal handler raises inside it, CPython 3.11 considers the thread finished
        self._has_ended.wait()
        if self._error is not None:
            raise self._error
        return self._received
