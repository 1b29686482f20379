"""Optimizers and loaders that a loop uses and that were not set up: found once, at the first backward."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from ...common.errors import RunError
from ...strategies.torch_internals.utils import find_index_sampler


def refuse_optimizers(known: Collection[object], parameters: Iterable[nn.Parameter], where: str) -> None:
    """Refuse optimizers of the parameters of a module that was set up without any.

    Its steps would use what is not yet the gradient of all ranks, or parameters that the strategy has replaced.

    Raises:
        RunError: if there is one.
    """
    own = set(map(id, parameters))
    for each in gc.get_objects():
        if not issubclass(type(each), Optimizer) or each in known:  # isinstance would ask proxies, too
            continue
        if any(id(p) in own for group in each.param_groups for p in group["params"]):
            raise RunError(
                f"engine.backward was called for {where}, whose {type(each).__name__} was not set up; pass it to "
                "engine.setup(module, optimizer), or to engine.setup_optimizers, and use the one that is returned."
            )


def warn_of_loaders(world_size: int) -> None:
    """Warn of a DataLoader that is read by every rank from the first sample to the last, instead of being divided."""
    objects = gc.get_objects()
    iterators = [each for each in objects if type(each).__name__.endswith("DataLoaderIter")]
    being_read = {id(find_index_sampler(each)) for each in iterators}
    for each in objects:
        if not issubclass(type(each), DataLoader) or being_read.isdisjoint((id(each.batch_sampler), id(each.sampler))):
            continue
        sampler = each.sampler
        reads_all = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
        if reads_all and not isinstance(each.dataset, Subset):  # which may be this rank's own part
            warnings.warn(
                f"The loop reads a DataLoader of {len(each.dataset)} samples that engine.setup_dataloaders has not "
                f"divided: each of the {world_size} ranks trains on all of them; pass it to engine.setup_dataloaders.",
                stacklevel=4,
            )
            return
