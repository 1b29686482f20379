"""Transfers of nested structures from one rank to another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .buckets import join, map_joined
from .parcels import Parcel, fill, slots, unpack
from .tensor_collectives import as_bytes

# torch's tags distinguish the transfers between two ranks; those of the user's own sends begin at 0
_FIRST_TAG: Final = 1 << 20
_NUM_TAGS: Final = 1 << 20


class PendingTransfer(Protocol):
    """Transfer that `isend` or `irecv` has begun."""

    def wait(self) -> Any:
        """Wait for the end of the transfer, and return the received data."""


class Mailbox:
    """Sends and receives structures: first the number of bytes, then the bytes, then the tensors."""

    def __init__(self, cpu_group: Any, device: torch.device) -> None:
        self._cpu_group = cpu_group
        self._device = device
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def send(self, parcel: Parcel, dst: int) -> PendingTransfer:
        """Begin to send a parcel to rank `dst`."""
        import torch.distributed as dist

        tag = _tag(self._num_sent, dst)
        payload = torch.frombuffer(bytearray(parcel.payload), dtype=torch.uint8)
        flats = [torch.tensor([payload.numel()]), payload]
        flats += [bucket.flat for bucket in join(parcel.tensors) if bucket.flat.numel()]
        works = [dist.isend(as_bytes(flat), dst, self._group_of(flat), tag) for flat in flats]
        return _Sending(works, flats)

    def receive(self, src: int) -> Any:
        """Wait for the next structure from `src`."""
        return self._finish(src, *self._receive(src, _tag(self._num_received, src)))

    def begin_receive(self, src: int) -> PendingTransfer:
        """Begin to receive, in a thread: the number of bytes has to arrive before the next receive can be posted."""
        tag = _tag(self._num_received, src)
        return _Receiving(lambda: self._receive(src, tag), lambda received: self._finish(src, *received))

    def _receive(self, src: int, tag: int) -> tuple[Any, list[Tensor], int]:
        size = self._fetch(torch.empty(1, dtype=torch.int64), src, tag)
        payload = self._fetch(torch.empty(int(size), dtype=torch.uint8), src, tag)
        skeleton = unpack(payload.numpy().tobytes())
        return skeleton, self._receive_tensors(skeleton, src, tag, on_cpu=True), tag

    def _finish(self, src: int, skeleton: Any, on_cpu: list[Tensor], tag: int) -> Any:
        """Receive the tensors on the GPU in the caller's thread: nccl needs all calls of a process in one thread."""
        cpu, gpu = iter(on_cpu), iter(self._receive_tensors(skeleton, src, tag, on_cpu=False))
        return fill(skeleton, [next(cpu if slot.is_cpu else gpu) for slot in slots(skeleton)])

    def _receive_tensors(self, skeleton: Any, src: int, tag: int, *, on_cpu: bool) -> list[Tensor]:
        empty = [slot.empty(self._device) for slot in slots(skeleton) if slot.is_cpu is on_cpu]
        return map_joined(empty, lambda flat: self._fetch(flat, src, tag))

    def _fetch(self, flat: Tensor, src: int, tag: int) -> Tensor:
        import torch.distributed as dist

        dist.recv(as_bytes(flat), src, self._group_of(flat), tag)
        return flat

    def _group_of(self, tensor: Tensor) -> Any:
        return self._cpu_group if tensor.is_cpu else None


def _tag(counter: Counter[int], peer: int) -> int:
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
    def __init__(self, receive: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self._receive = receive
        self._finish = finish
        self._outcome: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="echelon irecv", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._received = self._receive()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = error

    def wait(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        if not self._outcome:
            self._outcome.append(self._finish(self._received))
        return self._outcome[0]
