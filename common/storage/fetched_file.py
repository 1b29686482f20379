"""FetchedFile: an object of a store in the memory of this process, of which only what is wanted is read."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ..errors import StoreError
from .paths import StorePath
from .store import IN_FLIGHT, PART, in_parallel

_FIRST: Final = 32 << 10
"""Bytes that are read at once, which hold the header of most files."""
_GAP: Final = 64 << 10
"""Bytes between two wanted pieces up to which both are read in one request."""


class FetchedFile:
    """An object whose bytes are at the same places of a memory map, once they were wanted.

    Args:
        path: the object.
        size: its bytes.
        is_lazy: read only the beginning now, and the rest as `want` says.
        sha256: its hash in hex, which is compared once all of a lazy file was read; by default it is not.
    """

    def __init__(self, path: StorePath, size: int, *, is_lazy: bool, sha256: str = "") -> None:
        self.path, self.size, self.whole_size, self.is_lazy = path, size, size, is_lazy
        self.data = mmap.mmap(-1, max(size, 1))
        self._lock = threading.Lock()
        self._here: list[tuple[int, int]] = []
        self._sha256 = sha256 if is_lazy else ""
        self._last = self._streak = 0
        self.want([(0, min(size, _FIRST) if is_lazy else size)])

    def want(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read the bytes of these spans that are not here yet, several requests at a time.

        Raises:
            StoreError: if the store fails, or all bytes are here and their hash is another one.
        """
        with self._lock:
            missing = list(_subtract_spans(_join_spans(spans, _GAP), self._here))
            pieces = list(_split_spans(_subtract_spans([self._with_next(span) for span in missing], self._here)))
            in_parallel(self._read, pieces)
            self._here = list(_join_spans([*self._here, *pieces], 0))
            expected = self._sha256 if self._here == [(0, self.size)] else ""
            if expected:
                self._sha256 = ""
                with memoryview(self.data)[: self.size] as view:
                    found = hashlib.sha256(view).hexdigest()
                if found != expected:
                    raise StoreError(
                        f"{self.path} has the hash {found}, not {expected}: its content has changed; use another "
                        "checkpoint."
                    )

    def content(self) -> bytes:
        """Return all bytes."""
        self.want([(0, self.size)])
        return self.data[: self.size]

    def digest(self, hash_name: str = "sha256") -> str:
        """Return the hash of the content in hex; of a lazy file, parts are read in turn and not kept."""
        found = hashlib.new(hash_name)
        if not self.is_lazy:
            with memoryview(self.data)[: self.size] as view:
                found.update(view)
            return found.hexdigest()
        running: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="echelon-store") as pool:
            for begin, end in _split_spans([(0, self.size)]):
                if len(running) == IN_FLIGHT:
                    found.update(running.popleft().result())
                running.append(pool.submit(self.path.store.read_range, self.path, begin, end))
            while running:
                found.update(running.popleft().result())
        return found.hexdigest()

    def _with_next(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return a span with what follows it, as much as was read in a row so far: one request would follow another."""
        begin, end = span
        self._streak = self._streak + end - begin if begin == self._last else 0
        self._last = min(self.size, end + min(self._streak, IN_FLIGHT * PART)) if self.is_lazy else end
        return begin, self._last

    def _read(self, span: tuple[int, int]) -> None:
        self.data[span[0] : span[1]] = self.path.store.read_range(self.path, *span)


def _join_spans(spans: Iterable[tuple[int, int]], gap: int) -> Iterator[tuple[int, int]]:
    """Yield spans in order, those as one that overlap or are at most `gap` bytes apart."""
    begin = end = -1
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if end >= 0 and start <= end + gap:
            end = max(end, stop)
            continue
        if end >= 0:
            yield begin, end
        begin, end = start, stop
    if end >= 0:
        yield begin, end


def _subtract_spans(spans: Iterable[tuple[int, int]], here: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what of `spans` is in none of those that are `here`, which are in order."""
    known = list(here)
    for begin, end in spans:
        for start, stop in known:
            if stop <= begin or start >= end:
                continue
            if begin < start:
                yield begin, start
            begin = max(begin, stop)
        if begin < end:
            yield begin, end


def _split_spans(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for begin, end in spans:
        for start in range(begin, end, PART):
            yield start, min(start + PART, end)
