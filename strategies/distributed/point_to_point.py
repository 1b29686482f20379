"""Nested structures from one rank to another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .buckets import Parcel, fill, join, joined, slots, unpack
from .tensor_collectives import as_bytes

# Messages between the same two ranks are told apart by torch's tags; the user's own sends begin at 0
_FIRST_TAG: Final = 1 << 20
_NUM_TAGS: Final = 1 << 20


class Transfer(Protocol):
    """What `isend` and `irecv` return."""

    def wait(self) -> Any:
        """Wait for the end of the transfer, and return what was received."""


class Mailbox:
    """Sends and receives whole structures: their size first, then their bytes, then their tensors."""

    def __init__(self, cpu_group: Any, device: torch.device) -> None:
        self._cpu_group = cpu_group
        self._device = device
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def send(self, parcel: Parcel, dst: int) -> Transfer:
        """Begin to send."""
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

    def begin_receive(self, src: int) -> Transfer:
        """Begin to receive, in a thread: how much comes is known only when its first part is here."""
        tag = _tag(self._num_received, src)
        return _Receiving(lambda: self._receive(src, tag), lambda received: self._finish(src, *received))

    def _receive(self, src: int, tag: int) -> tuple[Any, list[Tensor], int]:
        size = self._fetch(torch.empty(1, dtype=torch.int64), src, tag)
        payload = self._fetch(torch.empty(int(size), dtype=torch.uint8), src, tag)
        skeleton = unpack(payload.numpy().tobytes())
        return skeleton, self._columns(skeleton, src, tag, on_cpu=True), tag

    def _finish(self, src: int, skeleton: Any, cpu_columns: list[Tensor], tag: int) -> Any:
        """Receive what is on the GPU, too, in the caller's thread: nccl wants all of a process's calls in one."""
        cpu, other = iter(cpu_columns), iter(self._columns(skeleton, src, tag, on_cpu=False))
        return fill(skeleton, [next(cpu if slot.is_cpu else other) for slot in slots(skeleton)])

    def _columns(self, skeleton: Any, src: int, tag: int, *, on_cpu: bool) -> list[Tensor]:
        empty = [slot.empty(self._device) for slot in slots(skeleton) if slot.is_cpu is on_cpu]
        return joined(empty, lambda flat: self._fetch(flat, src, tag))

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
        self._flats = flats  # torch does not keep what it sends

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
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            self._error = error

    def wait(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        if not self._outcome:
            self._outcome.append(self._finish(self._received))
        return self._outcome[0]
