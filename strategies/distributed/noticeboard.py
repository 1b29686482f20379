"""Messages that processes leave for each other in a torch.distributed store."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SHORTEST_PAUSE: Final = 0.001  # seconds between two looks at the store, doubled from look to look
_LONGEST_PAUSE: Final = 0.05

Messages: TypeAlias = dict[str, Any]
"""Messages by their keys."""


class Noticeboard:
    """JSON messages under keys that every process with access to the same store can read.

    Use it where collectives cannot be used: from any thread, before a process group exists, after it has broken, or
    when only some ranks take part. Tensors go through `Collectives`. No method is collective. If the store is gone,
    methods raise torch's `DistError`, which is a `RuntimeError`.

    Args:
        store: a store that all participants can reach; it may be shared with other users.
        prefix: separates the keys of this board from others in the same store.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        self._store: Any = PrefixStore(prefix, store)

    def post(self, key: str, message: object = None) -> None:
        """Leave a message, replacing an earlier one under the same key."""
        self._store.set(key, _encode_message(message))

    def post_first(self, key: str, message: object) -> object:
        """Leave a message unless the key has one already, and return the one under the key."""
        return _decode_message(self._store.compare_set(key, "", _encode_message(message)))

    def has(self, key: str) -> bool:
        """Return whether there is a message under the key."""
        return bool(self._store.check([key]))

    def read(self, key: str) -> Any:
        """Return the message under the key, or None if there is none."""
        return _decode_message(self._store.get(key)) if self.has(key) else None

    def wait_for(
        self, keys: Sequence[str], timeout: float = math.inf, *, until: Callable[[Messages], bool] | None = None
    ) -> Messages:
        """Wait until there is a message under each key, and return those that came in time, in the order of `keys`.

        Args:
            keys: the keys to wait for.
            timeout: the longest time to wait, in seconds.
            until: called with the messages so far after every look at the store; True, or an error, ends the wait.
        """
        end, pause, messages = time.monotonic() + timeout, _SHORTEST_PAUSE, Messages()
        while True:
            # not store.wait(), which cannot be interrupted by signals and logs warnings when it times out
            for key in keys:
                if key not in messages and self.has(key):
                    messages[key] = self.read(key)
            is_over = len(messages) == len(keys) or time.monotonic() >= end
            if is_over or (until is not None and until(messages)):
                return {key: messages[key] for key in keys if key in messages}
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def count(self, key: str) -> int:
        """Count this call, and return the number of calls with the key by all processes. Not for keys of `post`."""
        return int(self._store.add(key, 1))

    def remove_once_read(self, num_readers: int, *keys: str) -> None:
        """Remove the messages under these keys when the last of `num_readers` processes calls this."""
        counter = f"{keys[0]}/readers"
        if self.count(counter) == num_readers:
            for key in (*keys, counter):
                self._store.delete_key(key)


def _encode_message(message: object) -> bytes:
    return zlib.compress(json.dumps(message).encode(), 1)  # the tensor entries of a checkpoint can take 8 MB


def _decode_message(content: bytes) -> object:
    return json.loads(zlib.decompress(content))
