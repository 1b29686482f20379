"""WatchedShards: this rank's shards of the weights, and which hooks of the user have written to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..state.digest import digest_of_all
from ..state.dtensor import is_dtensor, is_wrapper, local_shard
from ..torch_internals.fake_tensors import is_without_memory


class WatchedShards:
    """Shards of a module's weights on this rank, compared by digests before and after hooks.

    Replicas that differ are found by comparing ranks; shards differ anyway.

    Args:
        module: the module, whose weights are sharded whenever hooks run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.writers: list[str] = []
        """The hooks that have changed values, each once."""

    @contextmanager
    def during(self, hook: str) -> Iterator[None]:
        """Note whether the block, which calls a hook of this name, changes a value."""
        before = self._digest()
        yield
        if hook not in self.writers and self._digest() != before:
            self.writers.append(hook)

    def _digest(self) -> int:
        sharded = (each for each in self._module.parameters() if is_dtensor(each) and not is_wrapper(each))
        return int(digest_of_all(shard for shard in map(local_shard, sharded) if not is_without_memory(shard)))
