"""CUDA devices that this machine does not have: tensors that say they are there, streams and events that take note."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def tensor_on(index: int, tensor: Tensor) -> Any:
    """Return a tensor that says it is on a device; its numbers are where they were."""
    return tensor.as_subclass(_CLASSES[index])


def _class_on(index: int) -> type[Tensor]:
    attributes = {"is_cuda": True, "device": torch.device("cuda", index), "cpu": lambda self: self.as_subclass(Tensor)}
    return type(f"TensorOn{index}", (Tensor,), attributes)


_CLASSES = [_class_on(index) for index in range(4)]


class PretendedCuda:
    """Streams and events as torch.cuda has them, with a current device for each thread, which is 0 at first.

    A stream takes commands; nothing is done before somebody synchronizes with it: `log` holds what a real device would
    have been told.
    """

    def __init__(self) -> None:
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
        """Put this in place of torch.cuda's streams and events, and pin without a device."""
        cuda = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.index = cuda.device if device is None else torch.device(device).index

            def wait_event(self, event: Any) -> None:
                cuda.log.append(("wait", self.index, event.index))

            def wait_stream(self, stream: Any) -> None:
                cuda.log.append(("wait for stream", self.index, stream.index))

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", self.index))

        class Event:
            index = None

            def record(self, stream: Any = None) -> None:
                self.index = cuda.device if stream is None else stream.index
                cuda.log.append(("record", self.index))

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", self.index))

            def query(self) -> bool:
                return True

        @contextmanager
        def stream(stream: Any) -> Any:
            before, cuda._thread.device = cuda.device, stream.index
            cuda.stream_of_now = stream
            try:
                yield
            finally:
                cuda._thread.device = before
                cuda.stream_of_now = None

        plain_empty = torch.empty

        def empty(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return plain_empty(*args, **options)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch, "empty", empty)
        return self
