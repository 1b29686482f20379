"""A proxy on loopback before a server of HTTP: counts what passes, and fails the requests that a test names."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal["status", "reset", "lost", "stall", "truncate", "slow"]

_AT_ONCE = 1 << 16
_REASONS = {400: "ExpiredToken", 403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
_MESSAGES = {400: "The provided token has expired."}


@dataclass(frozen=True)
class Fault:
    """Trouble that a request gets.

    ``status``: an answer of S3 with this number, and the server never sees the request. ``reset``: so, but the
    connection is reset. ``lost``: the server has done what was asked, and then the connection is reset. ``stall``:
    no answer for `seconds`, or until `until` is set, and then the request goes on to the server. ``truncate``: half
    the body of the answer, then the connection is closed. ``slow``: an answer in pieces over `seconds`.
    """

    kind: Kind
    status: int = 503
    seconds: float = 3600.0
    until: threading.Event | None = None


@dataclass
class Request:
    """A request that has passed: its first line, and the bytes of both bodies."""

    method: str
    target: str
    sent: int = 0
    received: int = 0
    status: int = 0
    fault: Fault | None = None
    key: str = ""
    """The access key that has signed it."""


@dataclass
class Rule:
    """Requests of a kind that fail: those from number `first` (from 0) to before `last`."""

    fault: Fault
    matches: Callable[[Request], bool]
    first: int
    last: float
    seen: int = 0


@dataclass
class Proxy:
    """The running proxy; its attributes can be read and its methods called from any thread."""

    address: str
    requests: list[Request] = field(default_factory=list)
    keeps_listings: bool = False
    """Whether a listing is answered as when it was first asked for since this was set, as by a store that lags."""
    listings: dict[str, bytes] = field(default_factory=dict)
    _rules: list[Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self,
        fault: Fault,
        nth: int = 0,
        times: float = 1,
        matches: Callable[[Request], bool] = lambda request: True,
    ) -> Rule:
        """Fail `times` requests that match, from the `nth` (from 0) of those that come from now on."""
        rule = Rule(fault, matches, nth, nth + times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Forget all faults: every request passes from now on. Those that stall go on to do so."""
        with self._lock:
            self._rules.clear()

    def reset_counts(self) -> list[Request]:
        """Return the requests so far, and count from none."""
        with self._lock:
            seen, self.requests = self.requests, []
        return seen

    def take(self, request: Request) -> Fault | None:
        """Note a request, and return the trouble that it gets."""
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.matches(request):
                    rule.seen += 1
                    if request.fault is None and rule.first < rule.seen <= rule.last:
                        request.fault = rule.fault
        return request.fault


@contextmanager
def faulty_proxy(server: str) -> Iterator[Proxy]:
    """Yield a proxy before the server of this address, on a thread of this process."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    proxy = Proxy("")

    async def serve() -> asyncio.Server:
        listening = await asyncio.start_server(
            lambda reader, writer: _converse(proxy, urlsplit(server).port or 80, reader, writer), "127.0.0.1", 0
        )
        proxy.address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        return listening

    def run() -> None:
        asyncio.set_event_loop(loop)
        listening = loop.run_until_complete(serve())
        loop.run_forever()
        listening.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, name="faulty proxy", daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


async def _converse(proxy: Proxy, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection, until either side ends it."""
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while head := await _head(reader):
            method, target, _ = head[0].split(" ", 2)
            headers = _fields(head)
            key = headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
            request = Request(method, target, key=key)
            fault = proxy.take(request)
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await _body(reader, headers)
            request.sent = len(body)
            if fault is not None and not await _passes(fault, request, writer):
                continue
            is_kept = proxy.keeps_listings and method == "GET" and "list-type=2" in target
            if is_kept and target in proxy.listings:
                writer.write(proxy.listings[target])
                continue
            lines = [line for line in head if not line.lower().startswith(("expect:", "connection:"))]
            if headers.get("transfer-encoding", "").lower() == "chunked":
                lines = [line for line in lines if not line.lower().startswith("transfer-encoding:")]
                lines.append(f"Content-Length: {len(body)}")
            answer = await asyncio.open_connection("127.0.0.1", port)
            try:
                answer[1].write("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body)
                if is_kept:
                    proxy.listings[target] = await _whole(answer[0])
                    writer.write(proxy.listings[target])
                    continue
                await _answer(fault, request, answer[0], writer)
            finally:
                answer[1].close()
            if writer.is_closing():
                break
    writer.close()


async def _passes(fault: Fault, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Give the trouble that the server never sees; return whether the request goes on to it."""
    if fault.kind == "status":
        name = _REASONS.get(fault.status, "InternalError")
        message = _MESSAGES.get(fault.status, "by the proxy")
        text = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>{message}</Message></Error>"
        content = "" if request.method == "HEAD" else text
        request.status = fault.status
        writer.write(
            f"HTTP/1.1 {fault.status} {name}\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(text)}\r\n\r\n{content}".encode()
        )
        return False
    if fault.kind == "reset":
        _reset(writer)
    if fault.kind == "stall":
        end = time.monotonic() + fault.seconds
        while time.monotonic() < end and not (fault.until is not None and fault.until.is_set()):
            await asyncio.sleep(0.02)
    return fault.kind != "reset"


async def _answer(
    fault: Fault | None, request: Request, answer: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Pass the server's answer on, or as much of it as the fault leaves."""
    head = await _head(answer)
    request.status = int(head[0].split(" ", 2)[1])
    if fault is not None and fault.kind == "lost":
        await answer.read()
        _reset(writer)
        return
    headers = _fields(head)
    length = int(headers.get("content-length", -1))
    is_whole = length >= 0 or "transfer-encoding" in headers or request.method == "HEAD"
    lines = [line for line in head if not line.lower().startswith("connection:")]
    writer.write("\r\n".join([*lines, *([] if is_whole else ["Connection: close"]), "", ""]).encode("latin-1"))
    left = length // 2 if fault is not None and fault.kind == "truncate" and length > 0 else float("inf")
    while left > 0 and (part := await answer.read(int(min(left, _AT_ONCE)))):
        left -= len(part)
        request.received += len(part)
        writer.write(part)
        await writer.drain()
        if fault is not None and fault.kind == "slow":
            await asyncio.sleep(fault.seconds * len(part) / max(length, 1))
    if left == 0 or not is_whole:
        await writer.drain()
        writer.close()


async def _whole(answer: asyncio.StreamReader) -> bytes:
    """Return an answer of the server as one that leaves the connection open."""
    head, body = await _head(answer), await answer.read()
    kept = [line for line in head if not line.lower().startswith(("connection:", "content-length:"))]
    return "\r\n".join([*kept, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


async def _head(reader: asyncio.StreamReader) -> list[str]:
    """Read the lines before a body; none at the end of the connection."""
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return []
    return text.decode("latin-1").split("\r\n")[:-2]


def _fields(head: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in head[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that the other side reads "connection reset by peer"."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
