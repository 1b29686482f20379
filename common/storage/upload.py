"""Upload: a new object that is written in parts, several at a time, and appears whole at the end or not at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from ..errors import StoreError
from .filesystem import forget_filesystem
from .paths import StorePath
from .pending import Pending
from .store import IN_FLIGHT, PART, Store

_LARGEST_COUNT: Final = 9_000
"""Parts of an object; S3 takes 10,000."""


class Upload:
    """A new object, written from the beginning to the end; `finish` makes it appear.

    S3's is sent in parts by several threads, each part again after an error; other stores' as their client writes a
    file. At most `IN_FLIGHT` parts and the one that is being filled are held in memory.

    Args:
        path: the object.
        size: its bytes, if known: parts of a very large one are larger.
        pending: what counts the bytes that the store has confirmed.
    """

    def __init__(self, path: StorePath, size: int = 0, pending: Pending | None = None) -> None:
        self._path, self._store = path, path.store
        self._part = max(PART, -(-size // _LARGEST_COUNT))
        self._filling = bytearray()
        self._size = 0
        self._count = (lambda size: None) if pending is None else pending.add
        self._parts: _Parts | None = None
        self._file: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parts is not None:
            self._parts.end(is_aborted=kind is not None)
        if self._file is not None and kind is not None:
            with suppress(Exception):  # nothing has appeared, and what was sent is of no use
                self._file.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; they are copied, or sent before this returns."""
        data = memoryview(data)
        self._size += len(data)
        while data:
            taken = data[: self._part - len(self._filling)]
            self._filling += taken
            data = data[len(taken) :]
            if len(self._filling) == self._part:
                self._send()

    def finish(self) -> int:
        """Make the object appear, and return its bytes once the store has confirmed them.

        Raises:
            StoreError: if a part could not be sent, or the store has another number of bytes.
        """
        if self._parts is None and self._file is None:
            self._store.write(self._path, bytes(self._filling))
            self._count(self._size)
        else:
            if self._filling:
                self._send()
            if self._parts is not None:
                self._parts.complete()
            else:
                self._store.retry.call(f"Writing {self._path}", self._file.close)
        found = self._store.size(self._path)
        if found != self._size:
            raise StoreError(
                f"{self._path} has {found} bytes after {self._size} were written; check whether another program writes "
                "there."
            )
        return self._size

    def _send(self) -> None:
        content, self._filling = bytes(self._filling), bytearray()
        if self._parts is None and self._file is None:
            mount = self._store.mount(self._path)
            if hasattr(mount.fs, "call_s3"):
                self._parts = _Parts(self._store, self._path, self._count)
            else:
                self._file = mount.fs.open(mount.path(self._path.key), "wb", block_size=self._part)
        if self._parts is not None:
            self._parts.send(content)
        else:
            self._file.write(content)
            self._count(len(content))


class _Parts:
    """The parts of an object of S3."""

    def __init__(self, store: Store, path: StorePath, count: Callable[[int], None]) -> None:
        self._store, self._path, self._confirm = store, path, count
        self._where = dict(zip(("Bucket", "Key"), path.key.split("/", 1), strict=True))
        self._id = self._call("create_multipart_upload")["UploadId"]
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="echelon-upload")
        self._running: deque[Future[None]] = deque()
        self._tags: dict[int, str] = {}
        self._count = 0

    @property
    def _client(self) -> Any:
        return self._store.mount(self._path).fs  # another one once credentials were renewed

    def send(self, content: bytes) -> None:
        while len(self._running) >= IN_FLIGHT:
            self._running.popleft().result()
        self._count += 1
        self._running.append(self._pool.submit(self._send, self._count, content))

    def complete(self) -> None:
        while self._running:
            self._running.popleft().result()
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        try:
            self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            if self._store.size(self._path) is None:  # else the answer to a try before was lost
                raise

    def end(self, *, is_aborted: bool) -> None:
        self._pool.shutdown(cancel_futures=is_aborted)
        if is_aborted:
            with suppress(Exception):  # the store's own rule for uploads that were begun removes it otherwise
                self._client.call_s3("abort_multipart_upload", UploadId=self._id, **self._where)

    def _send(self, number: int, content: bytes) -> None:
        answer = self._call("upload_part", PartNumber=number, UploadId=self._id, Body=content)
        self._tags[number] = answer["ETag"]
        self._confirm(len(content))

    def _call(self, method: str, **arguments: object) -> Any:
        return self._store.retry.call(
            f"Writing {self._path}",
            lambda: self._client.call_s3(method, **self._where, **arguments),
            lambda: forget_filesystem(self._store.scheme),
        )
