"""Whole builds: pretrained models that every rank has read whole, before it kept its shards of them."""

from __future__ import annotations

import warnings

from torch import nn

from ..distributed.ranks import Ranks
from ..state.dtensor import local_shard

LOADED = "echelon_pretrained"
"""The attribute of a model that `load_pretrained` has filled: its folder."""
_READ = "_weight_conversions"
"""The attribute that ``from_pretrained`` of transformers 5 leaves in a model."""


def warn_of_whole_builds(module: nn.Module, strategy: str, ranks: Ranks) -> None:
    """Warn, on rank 0, of models that ``from_pretrained`` has built whole in each process of a strategy that shards."""
    if ranks.world_size == 1 or ranks.rank:
        return
    whole = [part for part in module.modules() if _READ in vars(part) and LOADED not in vars(part)]
    if not whole:
        return
    parameters = list(dict.fromkeys(p for part in whole for p in part.parameters()))
    own = sum(_bytes_here(parameter) for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    warnings.warn(
        f"{type(whole[0]).__name__}.from_pretrained has built the whole model, of {_format_bytes(size)}, in each of "
        f"{ranks.world_size} processes, which keep {_format_bytes(own)}. With strategy={strategy!r} and "
        "deferred_init=True, each reads only its shards if configure_model builds it from its config and calls "
        "echelon.load_pretrained(model, folder).",
        stacklevel=2,
    )


def _bytes_here(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_meta else local_shard(parameter).nbytes


def _format_bytes(size: int) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size = size // 1000 if unit != "MB" else size
    return f"{size / 1000:.1f} GB"
