"""Ranks: what the processes of a run tell each other while each writes its part of a checkpoint."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from ...strategies.errors import CheckpointError

TIMEOUT: Final = timedelta(minutes=30)
"""How long a rank may take for its part, while the run goes on."""
GRACE: Final = timedelta(seconds=5)
"""How long it may take when the run has failed, perhaps because it is dead."""
_LONGEST_PAUSE: Final = 0.05


class Ranks:
    """All ranks of a run, as one of them sees them; they agree by a c10d store, about one save after the other.

    Not by collectives: checkpoints are written in threads, and a process group takes calls of one thread only.
    Collective: every rank makes one, and begins the same saves in the same order.

    Args:
        store: one that all ranks reach; ranks may use it for other things.
        rank: this process.
        world_size: the number of processes.
        timeout: how long to wait for a rank that says nothing.
        grace: likewise, once this rank's run has failed.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta = TIMEOUT, grace: timedelta = GRACE
    ) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.world_size = rank, world_size
        self._timeout, self._grace = timeout, grace
        run = store.add(f"checkpoints/{rank}", 1)
        # a connection of its own: a store does one thing at a time
        self._store: Any = PrefixStore(f"checkpoints/{run}", store.clone())
        self._number = 0
        self._is_over = threading.Event()
        self._end = 0.0

    def begin(self) -> None:
        """Begin the next save."""
        self._number += 1

    def leave(self) -> None:
        """End this save; the last of the ranks clears away what they told each other."""
        with suppress(RuntimeError):  # the store has gone, with the process that hosts it
            if self._store.add(f"{self._number}/left", 1) == self.world_size:
                for topic in ("folder", "end", "error", "left", *map(part_of, range(1, self.world_size))):
                    self._store.delete_key(f"{self._number}/{topic}")

    def end(self) -> None:
        """Note that the run has failed: a rank that says nothing for some seconds more is dead."""
        self._end = time.monotonic() + self._grace.total_seconds()
        self._is_over.set()

    def tell(self, topic: str, content: Any = None) -> None:
        """Tell all ranks something about this save, as JSON."""
        with _reached():
            # compressed: a message may have 8 MB
            self._store.set(f"{self._number}/{topic}", zlib.compress(json.dumps(content).encode(), 1))

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this save has failed, unless they know; each of them raises this error."""
        with _reached():
            if self._store.check([f"{self._number}/error"]):
                return
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self.tell("error", f"{text} (On rank {self.rank} of {self.world_size}.)")

    def hear(self, topic: str, *, source: int) -> Any:
        """Wait for what rank `source` tells.

        Raises:
            CheckpointError: that with which another rank has failed; or if none comes.
        """
        key, error = f"{self._number}/{topic}", f"{self._number}/error"
        limit, pause = time.monotonic() + self._timeout.total_seconds(), 0.001
        with _reached():
            # asked again and again, since torch writes warnings when a wait for a store times out
            while not self._store.check([key]):
                if self._store.check([error]):
                    raise CheckpointError(self._read(error))
                if time.monotonic() > (min(limit, self._end) if self._is_over.is_set() else limit):
                    raise CheckpointError(
                        f"The checkpoint is not written: rank {source} of {self.world_size} has not said that its "
                        "part is done; look at why it ended or is so slow. Earlier checkpoints are untouched."
                    )
                time.sleep(pause) if self._is_over.is_set() else self._is_over.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return self._read(key)

    def hear_parts(self) -> Iterator[tuple[int, Any]]:
        """Wait for what every rank but 0 tells of its part, and give rank and content."""
        for rank in range(1, self.world_size):
            yield rank, self.hear(part_of(rank), source=rank)

    def _read(self, key: str) -> Any:
        return json.loads(zlib.decompress(self._store.get(key)))


def part_of(rank: int) -> str:
    """Return the topic under which a rank tells what it wrote."""
    return f"part/{rank}"


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one, and so is CheckpointError where it came from
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint is not written: the store of the run does not answer ({str(error).splitlines()[0]}); look "
            "at why the process that hosts it, often rank 0, has ended. Earlier checkpoints are untouched."
        ) from error
