"""Omitted weights: those that a checkpoint leaves out as the module is built with them, known by their digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError
from ..distributed.collectives import Collectives
from ..wrapped.wrapped_tensors import dequantize_tensor
from .digest import part_digest
from .dtensor import held_as, is_dtensor, is_wrapper, local_shard, writes_shard
from .lazy_tensor import StoredTensor
from .schema import COUNT, TEXT, check_schema, text_like
from .shards import Holders, pieces_of

OMITTED: Final = "omitted_weights"
"""The part of a checkpoint with the names of the weights that it leaves out."""
OMITTED_SCHEMA: Final = {
    TEXT: {"shape": [COUNT], "dtype": torch.dtype, "digest": text_like(r"[0-9a-f]{16}", "16 hex digits")}
}
_BUILT: Final = "_echelon_built"
"""The attribute of a module with the digests of its weights as they were built."""
_CHANGED: Final = "_echelon_changed"
"""The attribute of a module with the names of weights that were trained or loaded since it was built."""
_SHOWN: Final = 5
_SIZE: Final = 1 << 64


def digests_of(
    state: Mapping[str, object], collectives: Collectives, dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, str]:
    """Return a digest of each tensor in a module's state, which is the same on every layout. Collective: all ranks.

    A quantized tensor has the digest of its values; one whose class cannot compute them has none.

    Args:
        state: Tensors by name: whole ones, DTensors, and marks of those that other pipeline stages have.
        collectives: Of the ranks that hold them.
        dtypes: The dtypes to which tensors are converted first.
    """
    holders, own = Holders(), {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            parts = [*_parts_of(value, name, (dtypes or {}).get(name, value.dtype), holders)]
            own[name] = None if None in parts else sum(int(part) for part in parts if part is not None) % _SIZE
    found: dict[str, list[int | None]] = {}
    for rank in collectives.all_gather_object((own, {name for name in own if is_dtensor(state[name])})):
        for name, digest in rank[0].items():
            if name in rank[1] or name not in found:  # whole tensors are the same on all ranks
                found.setdefault(name, []).append(digest)
    whole = {name: None if None in parts else sum(part or 0 for part in parts) % _SIZE for name, parts in found.items()}
    return {name: f"{digest:016x}" for name, digest in whole.items() if digest is not None}


def _parts_of(value: Tensor, name: str, dtype: torch.dtype, holders: Holders) -> Iterable[Tensor | None]:
    """Yield the digests of the parts of a tensor that this rank answers for; None for one without values."""
    shape = tuple(value.shape)
    if not is_dtensor(value):
        values = _plain_values(value, dtype)
        yield None if values is None else part_digest(values, [0] * len(shape), shape)
    elif writes_shard(value, name, holders):
        values = _plain_values(held_as(value), dtype)
        for piece in pieces_of(value):
            yield None if values is None else part_digest(values[piece.here], piece.offsets, shape)


def _plain_values(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if isinstance(tensor, StoredTensor):
        tensor = tensor.clone()  # not kept
    if is_wrapper(tensor):
        try:
            tensor = dequantize_tensor(tensor)
        except CheckpointError:
            return None
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    return tensor.detach().to(dtype) if is_plain else None


# --- what a module was built with ------------------------------------------------------------------------------------


def note_changed(module: nn.Module, names: Iterable[str]) -> None:
    """Note that weights have other values than those with which a module is built: they were trained, or loaded."""
    vars(module)[_CHANGED] = frozenset(names) | vars(module).get(_CHANGED, frozenset())


def note_trained(module: nn.Module, optimizers: Iterable[Any] = ()) -> None:
    """Note that the weights that are trained now will change, and those of optimizers."""
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    named = module.named_parameters(remove_duplicate=False)
    note_changed(module, (name for name, parameter in named if parameter.requires_grad or parameter in held))


def built_digests(
    module: nn.Module, state: Mapping[str, object], optimizers: Sequence[Any], collectives: Collectives
) -> dict[str, str]:
    """Return the digests of a module's frozen weights as it was built, by name. Collective: every rank calls it.

    Args:
        module: the module, before a checkpoint is loaded into it.
        state: its state, as its strategy returns it.
        optimizers: those that train it.
        collectives: of all ranks.
    """
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    named = dict(module.named_parameters(remove_duplicate=False))
    frozen = [name for name, one in named.items() if not one.requires_grad and one not in held and name in state]
    known: dict[str, str] = vars(module).setdefault(_BUILT, {})
    changed = vars(module).get(_CHANGED, frozenset())
    asked = [name for name in frozen if name not in known and name not in changed]
    known.update(digests_of({name: state[name] for name in asked}, collectives))
    return {name: known[name] for name in frozen if name in known}


# --- what a checkpoint has of them -----------------------------------------------------------------------------------


def left_out(state: Mapping[str, Any], digests: Mapping[str, str], collectives: Collectives) -> dict[str, object]:
    """Return, by name, the weights of a state that a checkpoint can leave out: they are as they were built. Collective.

    Args:
        state: the module's state.
        digests: of the weights that may be left out, as they were built.
        collectives: of all ranks.
    """
    now = digests_of({name: state[name] for name in digests if name in state}, collectives)
    return {
        name: {"shape": list(state[name].shape), "dtype": state[name].dtype, "digest": digest}
        for name, digest in now.items()
        if digest == digests[name]
    }


def complete_state(
    saved: Mapping[str, Any], omitted: Mapping[str, Any], own: Mapping[str, Any], collectives: Collectives
) -> dict[str, Any]:
    """Return the saved state of a module with the weights that the checkpoint leaves out, from the module. Collective.

    Args:
        saved: the saved state.
        omitted: what the checkpoint says of the weights that it leaves out.
        own: the module's state, as it was built.
        collectives: of all ranks.

    Raises:
        CheckpointError: if the module was built on another base.
    """
    check_schema(omitted, OMITTED_SCHEMA, "What the checkpoint says of the weights that it leaves out")
    wanted = {name: entry for name, entry in omitted.items() if name not in saved}
    if not wanted:
        return dict(saved)
    missing = [name for name in wanted if name not in own]
    shapes = [
        f"{name} of {entry['shape']}, which has {list(own[name].shape)} here"
        for name, entry in wanted.items()
        if name in own and list(own[name].shape) != list(entry["shape"])
    ]
    if missing or shapes:
        raise CheckpointError(
            f"The checkpoint leaves out {len(wanted)} frozen weights, and the module, which is to have them, lacks "
            f"{_list_names([*missing, *shapes])}; build it as it was."
        )
    here = digests_of({name: own[name] for name in wanted}, collectives, {n: e["dtype"] for n, e in wanted.items()})
    others = [name for name, entry in wanted.items() if here.get(name) != entry["digest"]]
    if others:
        raise CheckpointError(
            f"The checkpoint leaves out {len(wanted)} frozen weights, which the module is to have as it is built, but "
            f"{len(others)} of them have other values than when it was saved: {_list_names(others)}. Build the module "
            "on the same base (the same pretrained weights and revision, or the same seed), before anything trains or "
            "loads into it; the other weights can be loaded with echelon.load_weights."
        )
    return {**saved, **{name: own[name] for name in wanted}}


def bytes_of(omitted: Mapping[str, object], state: Mapping[str, Any]) -> int:
    """Return the bytes of the whole weights that a checkpoint leaves out; a tied one counts once for each name."""
    return sum(
        local_shard(state[name]).element_size() * state[name].numel()
        for name in omitted
        if isinstance(state[name], Tensor)
    )


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
