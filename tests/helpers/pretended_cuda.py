"""Pretended CUDA devices: tensors that claim to be on them, and streams and events that record calls."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def tensor_on(index: int, tensor: Tensor) -> Any:
    """Return a tensor that claims to be on a device; its data stays where it was."""
    return tensor.as_subclass(_CLASSES[index])


class _OnDevice(Tensor):
    """A tensor whose copies happen when the streams of `PretendedCuda` reach them."""

    late: PretendedCuda | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = super().__torch_function__
        if func is not Tensor.copy_ or _OnDevice.late is None or _OnDevice.late.stream_of_now is None:
            return plain(func, types, args, kwargs)
        _OnDevice.late.stream_of_now.commands.append(lambda: plain(func, types, args, kwargs))
        return args[0]


def _class_on(index: int) -> type[Tensor]:
    attributes = {"is_cuda": True, "device": torch.device("cuda", index), "cpu": lambda self: self.as_subclass(Tensor)}
    return type(f"TensorOn{index}", (_OnDevice,), attributes)


_CLASSES = [_class_on(index) for index in range(4)]


class PretendedCuda:
    """Streams and events like torch.cuda's, with a current device per thread, which is 0 at first.

    `log` records the calls that a real device would have received. Copies are made at once; with `is_late`, those on a
    side stream are made as late as possible, when something waits for them, and new floating-point memory holds NaN.
    """

    def __init__(self, *, is_late: bool = False) -> None:
        self.is_late = is_late
        self.now, self.completed = 0.0, float("inf")
        """The devices' clock in milliseconds, and the time up to which they have completed recorded events."""
        self.log: list[tuple[Any, ...]] = []
        self.stream_of_now: Any = None
        self._thread = threading.local()

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return getattr(self._thread, "device", 0)

    def set_device(self, device: Any) -> None:
        self._thread.device = torch.device(device).index

    def install(self, monkeypatch: Any) -> PretendedCuda:
        """Replace torch.cuda's streams and events, and make pinning memory work without a device."""
        cuda = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.index = cuda.device if device is None else torch.device(device).index
                self.commands: list[Any] = []
                self.num_done = 0

            def wait_event(self, event: Any) -> None:
                cuda.log.append(("wait", self.index, event.index))
                event.reach()

            def wait_stream(self, stream: Any) -> None:
                cuda.log.append(("wait for stream", self.index, stream.index))
                stream.reach(len(stream.commands))

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", self.index))
                self.reach(len(self.commands))

            def reach(self, place: int) -> None:
                while self.num_done < place:
                    self.num_done += 1
                    self.commands[self.num_done - 1]()

        class Event:
            index = None
            stream: Any = None
            place = 0

            def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
                self.enable_timing = enable_timing

            def record(self, stream: Any = None) -> None:
                self.index = cuda.device if stream is None else stream.index
                self.stream, self.place = stream, 0 if stream is None else len(stream.commands)
                self.time = cuda.now
                cuda.log.append(("record", self.index))

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", self.index))
                self.reach()

            def query(self) -> bool:
                return self.time <= cuda.completed and (self.stream is None or self.stream.num_done >= self.place)

            def elapsed_time(self, end: Any) -> float:
                assert self.enable_timing
                assert end.enable_timing
                assert end.query(), "torch raises for an event that the device has not come to"
                return end.time - self.time  # type: ignore[no-any-return]

            def reach(self) -> None:
                if self.stream is not None:
                    self.stream.reach(self.place)

        @contextmanager
        def device(device: Any) -> Any:
            before, cuda._thread.device = cuda.device, torch.device(device).index
            try:
                yield
            finally:
                cuda._thread.device = before

        @contextmanager
        def stream(stream: Any) -> Any:
            before, cuda._thread.device = cuda.device, stream.index
            cuda.stream_of_now = stream
            try:
                yield
            finally:
                if before != stream.index:  # torch sets the device that was, which opens it; `device` does not
                    cuda.log.append(("open", before))
                cuda._thread.device = before
                cuda.stream_of_now = None

        plain_empty = torch.empty

        def empty(*args: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> Tensor:
            made = plain_empty(*args, **options)
            if cuda.is_late and made.is_floating_point():
                made.fill_(float("nan"))
            on_gpu = device is not None and torch.device(device).type == "cuda"
            return tensor_on(torch.device(device).index, made) if on_gpu else made

        def record_stream(tensor: Tensor, stream: Any) -> None:
            cuda.log.append(("keep for", stream.index))

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(Tensor, "record_stream", record_stream)
        monkeypatch.setattr(_OnDevice, "late", self if self.is_late else None)
        return self
