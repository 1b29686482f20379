"""FilledShards: the shards of a module that was built without memory, with the values that it would have had."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..distributed.collectives import Collectives
from ..module.deferred_init import DeferredInit, Places
from ..state.dtensor import is_dtensor, local_shard, shard_like
from ..state.sources import TensorSource, copy_to_shard
from ..torch_internals.modules import apply_to_tensors


class FilledShards:
    """Allocates the meta tensors of a sharded module, and fills them tensor by tensor.

    Args:
        module: the user's module.
        elsewhere: parameters that other ranks hold, and that stay on the meta device.
        device: the device of this rank.
        shard_device: where shards are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        elsewhere: Collection[nn.Parameter],
        device: torch.device,
        shard_device: torch.device,
    ) -> None:
        self._module, self._elsewhere, self._device, self._shard_device = module, elsewhere, device, shard_device

    def fill(self, root: nn.Module, deferred: DeferredInit, places: Places, collectives: Collectives) -> bool:
        """Fill the tensors of a module around the user's; return whether any was empty. Collective.

        Args:
            root: the module that is sharded.
            deferred: the record of their initialization.
            places: where the tensors were.
            collectives: over the ranks that share them.

        Raises:
            ModuleError: for tensors whose initialization was not recorded.
        """
        module = self._module
        recorded = {name for names in places.values() for name in names}
        named = _named_tensors(module)
        empty = {name for name, tensor in named if tensor.is_meta and tensor not in self._elsewhere}
        if not empty:
            return False
        if empty - recorded:
            raise ModuleError(
                f"{', '.join(sorted(empty - recorded)[:5])} of {type(module).__name__} is on the meta device and "
                "has no values; build it in configure_model, without torch.device('meta'), and set deferred_init=True."
            )
        apply_to_tensors(root, self._allocated)
        own, read = dict(_named_tensors(module)), set[int]()

        def take(name: str, value: Tensor | TensorSource) -> None:
            target = own[name]
            if target in self._elsewhere or id(target) in read:
                return
            if not isinstance(value, Tensor):
                copy_to_shard(value, target)
                read.add(id(target))  # tied tensors have several names, and are read once
                return
            with torch.no_grad():
                local_shard(target).copy_(local_shard(shard_like(value.to(target.dtype), target)))

        deferred.generator = collectives.broadcast(deferred.generator).cpu()
        deferred.replay(places, take)
        return True

    def _allocated(self, tensor: Tensor) -> Tensor:
        if tensor in self._elsewhere:
            return tensor
        device = self._shard_device if is_dtensor(tensor) else self._device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
