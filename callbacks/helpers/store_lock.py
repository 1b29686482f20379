"""Lock of a checkpoint folder in a store: an object that its holder writes again and again while it is alive."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from ...common.errors import CheckpointError
from ...common.storage import StorePath
from ...strategies.state.schema import COUNT, TEXT, check_schema, parse_json

BEAT: Final = 10.0
"""Seconds from one beat of the holder to the next."""
SILENCE: Final = 40.0
"""Seconds without a beat, by the clock of who waits, after which a holder on another machine is dead."""
SCHEMA: Final = {"host": TEXT, "pid": COUNT, "start": COUNT, "run": COUNT, "job": TEXT, "round": COUNT}
_HELD: Final = {**SCHEMA, "token": TEXT, "beat": COUNT}
_PAUSE: Final = 0.5

_log = logging.getLogger("echelon")


class StoreLock:
    """A lock that a run holds on a folder of a store.

    The object is written only if there is none, which S3, Google and Azure decide in one step. No clock but that of
    the one who waits counts.

    Args:
        path: the object.
        own: the holder, as in `SCHEMA`.
    """

    def __init__(self, path: StorePath, own: Mapping[str, object]) -> None:
        self._path, self._own = path, dict(own)
        self._token = secrets.token_hex(8)
        self._beat = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(
        self,
        is_dead: Callable[[Mapping[str, object]], bool],
        refusal: Callable[[Mapping[str, object]], Exception],
        wait: float,
    ) -> bool:
        """Take the lock; return False if another part of this run holds it.

        Args:
            is_dead: whether a holder has ended, or is followed by this run.
            refusal: the error for one that is alive.
            wait: the seconds to wait for a holder that is about to end.

        Raises:
            CheckpointError: if another run holds it.
        """
        seen, since, began, beats = "", time.monotonic(), time.monotonic(), 0
        while True:
            if self._path.store.write_if_absent(self._path, self._content()):
                self._thread = threading.Thread(target=self._keep, name="echelon-lock", daemon=True)
                self._thread.start()
                return True
            holder = self._holder()
            if holder is None:  # released meanwhile
                time.sleep(_PAUSE)
                continue
            if {name: holder[name] for name in SCHEMA} == self._own:
                return False
            now, state = time.monotonic(), f"{holder['token']} {holder['beat']}"
            if state != seen:
                seen, since, beats = state, now, beats + 1
            if is_dead(holder) or now - since > SILENCE:
                self._remove(holder)
                continue
            is_here = holder["host"] == self._own["host"]
            if now - began > wait and (is_here or beats > 1):
                raise refusal(holder)
            time.sleep(_PAUSE)

    def release(self) -> None:
        """Delete the lock, unless another run has taken it over."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(OSError):
                holder = self._holder()
                if holder is not None and holder["token"] == self._token:
                    self._path.unlink()

    def _content(self) -> bytes:
        return json.dumps({**self._own, "token": self._token, "beat": self._beat}).encode()

    def _holder(self) -> dict[str, object] | None:
        try:
            holder: dict[str, object] = parse_json(self._path.read_bytes(), str(self._path))
            check_schema(holder, _HELD, str(self._path))
        except FileNotFoundError:
            return None
        except CheckpointError:  # not ours: whoever wrote it is not known to be alive
            return {
                **dict.fromkeys(("host", "job", "token"), ""),
                "pid": 0,
                "start": 0,
                "run": 0,
                "round": 0,
                "beat": 0,
            }
        return holder

    def _remove(self, holder: Mapping[str, object]) -> None:
        """Delete the lock of a dead holder; of several that find it dead, only the first one does."""
        claim = self._path.with_name(f"{self._path.name}-{holder['token']}")
        if claim.store.write_if_absent(claim, self._token.encode()):
            now = self._holder()
            if now is not None and now["token"] == holder["token"]:
                self._path.unlink()
            claim.unlink()
        else:
            time.sleep(_PAUSE)

    def _keep(self) -> None:
        while not self._is_over.wait(BEAT):
            try:
                holder = self._holder()
                if holder is None or holder["token"] != self._token:
                    _log.error("%s was taken over by another run, which found this one silent.", self._path)
                    return
                self._beat += 1
                self._path.write_bytes(self._content())
            except OSError as error:
                _log.warning("%s; the lock of the folder is renewed later.", error)
