"""Messages that processes leave for each other in a store of torch.distributed."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

_SHORTEST_PAUSE: Final = 0.001  # seconds between two looks at the store, doubled from look to look
_LONGEST_PAUSE: Final = 0.05

Messages: TypeAlias = dict[str, Any]
"""Messages by their keys."""


class Noticeboard:
    """JSON messages under keys, which every process that reaches the same store can read.

    It is for what collectives cannot do: talk from any thread, before a process group exists, after it has broken, or
    when only some ranks take part. Tensors go through `Collectives`. Nothing here is collective, and a store that is
    gone raises torch's `DistError`, which is a `RuntimeError`.

    Args:
        store: a store that all who take part reach; it may be used for other things.
        prefix: keeps the keys of one board apart from those of others in the same store.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        self._store: Any = PrefixStore(prefix, store)

    def post(self, key: str, message: Any = None) -> None:
        """Leave a message, in place of an earlier one under the same key."""
        self._store.set(key, _encoded(message))

    def post_first(self, key: str, message: Any) -> Any:
        """Leave a message unless there is one under the key, and return the one that is there then."""
        return _decoded(self._store.compare_set(key, "", _encoded(message)))

    def has(self, key: str) -> bool:
        """Return whether there is a message under the key."""
        return bool(self._store.check([key]))

    def read(self, key: str) -> Any:
        """Return the message under the key; None without one."""
        return _decoded(self._store.get(key)) if self.has(key) else None

    def wait_for(
        self, keys: Sequence[str], timeout: float = math.inf, *, until: Callable[[Messages], bool] | None = None
    ) -> Messages:
        """Wait until there is a message under each key, and return those that came in time, in the order of `keys`.

        Args:
            keys: what to wait for.
            timeout: seconds after which to wait no longer.
            until: asked after every look at the store, with the messages so far; True ends the wait, and so does an
                error.
        """
        end, pause, messages = time.monotonic() + timeout, _SHORTEST_PAUSE, Messages()
        while True:
            # not store.wait(), which hears no signal and writes warnings when its time is up
            for key in keys:
                if key not in messages and self.has(key):
                    messages[key] = self.read(key)
            is_over = len(messages) == len(keys) or time.monotonic() >= end
            if is_over or (until is not None and until(messages)):
                return {key: messages[key] for key in keys if key in messages}
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def count(self, key: str) -> int:
        """Count this call, and return how many there have been with the key, by all processes. Not a key of `post`."""
        return int(self._store.add(key, 1))

    def remove_once_read(self, num_readers: int, *keys: str) -> None:
        """Remove the messages under these keys with the call of the last of `num_readers` processes."""
        counter = f"{keys[0]}/readers"
        if self.count(counter) == num_readers:
            for key in (*keys, counter):
                self._store.delete_key(key)


def _encoded(message: Any) -> bytes:
    return zlib.compress(json.dumps(message).encode(), 1)  # the tensors of a checkpoint have entries of 8 MB


def _decoded(content: bytes) -> Any:
    return json.loads(zlib.decompress(content))
