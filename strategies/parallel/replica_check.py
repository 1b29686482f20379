"""ReplicaCheck: the parameters and buffers that several ranks hold, compared over these ranks by their digests."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.collectives import Collectives
from ..state.digest import bits_of, digest_of_all
from ..state.dtensor import is_dtensor, local_shard
from ..torch_internals.modules import is_persistent
from ..torch_internals.tensors import is_traceable_wrapper_subclass

Ranks = tuple[int, ...]
Kind = Literal["parameter", "frozen parameter", "buffer"]


@dataclass(frozen=True)
class ReplicaDifference:
    """A parameter or buffer that is not equal on two ranks that hold the same part of it."""

    name: str
    kind: Kind
    ranks: tuple[Ranks, Ranks]
    """The ranks that hold the first value, and one rank, or several, with another."""
    values: tuple[object, object]
    """What is held there: the first elements that differ, or shapes."""
    index: tuple[int, ...] = ()
    """The position of the first element that differs, in the shard if the parameter is sharded."""

    def __str__(self) -> str:
        place = f"{self.name}{list(self.index)}" if self.index else self.name
        (first, second), (one, other) = self.ranks, self.values
        return f"the {self.kind} {place} is {one} on {_name_ranks(first)} and {other} on {_name_ranks(second)}"


class _Held(NamedTuple):
    """What the ranks tell each other of a tensor after they have found a difference."""

    digest: int
    kind: Kind
    shape: tuple[int, ...]


class ReplicaCheck:
    """Compares what several ranks hold in common: replicas, and the shards that are repeated along an axis of the mesh.

    Nothing but equal updates keeps replicas equal. Each rank computes one digest for each set of ranks with which it
    shares parameters; the parameters are looked at one by one only after a digest was different.

    A rank that had fewer micro-batches in a step takes the frozen parameters of one with all, since a step may have
    written them (memories, queues, codebooks, momentum teachers).

    Args:
        module: the user's module.
        collectives: over all ranks.
        ranks_of: returns the ranks that hold the same part of a parameter or buffer of this name; by default, all.
        with_frozen: whether to compare parameters that require no gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        ranks_of: Callable[[str, Tensor], Sequence[int]] | None = None,
        *,
        with_frozen: bool = True,
    ) -> None:
        self._module, self._collectives, self._with_frozen = module, collectives, with_frozen
        everyone = tuple(range(collectives.world_size))
        self._ranks_of = ranks_of or (lambda name, tensor: everyone)
        self._num_steps = 0
        """How often this rank ran a step, with its backward, since they were compared."""
        self._is_absent = False

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Count no backward inside: it is none of a step with samples of this rank."""
        self._is_absent = True
        try:
            yield
        finally:
            self._is_absent = False

    def count_backward(self) -> None:
        """Count a backward."""
        self._num_steps += not self._is_absent

    def compare(self, *, with_buffers: bool = False) -> ReplicaDifference | None:
        """Return the first difference, on all ranks; None if there is none. Collective: every rank calls it.

        Args:
            with_buffers: compare the buffers that the module saves as well.
        """
        if self._collectives.is_fake:
            return None
        parts: dict[Ranks, list[Tensor]] = defaultdict(list)
        names: dict[Ranks, int] = defaultdict(int)
        shared = self._shared(with_buffers=with_buffers)
        for name, (tensor, ranks) in shared.items():
            parts[ranks] += _plain_parts(tensor)
            names[ranks] = zlib.crc32(f"{name} {tuple(tensor.shape)}".encode(), names[ranks])
        digests = {ranks: (int(digest_of_all(own)), names[ranks]) for ranks, own in parts.items()}
        rows = self._collectives.all_gather_object((self._num_steps, digests))
        self._num_steps = 0
        by_rank = [row[1] for row in rows]
        if all(by_rank[other].get(ranks) == own for row in by_rank for ranks, own in row.items() for other in ranks):
            return None
        return self._find(shared, [row[0] for row in rows])

    def _shared(self, *, with_buffers: bool) -> dict[str, tuple[Tensor, Ranks]]:
        """Return the tensors that other ranks hold as well, with all these ranks."""
        named: Iterable[tuple[str, Tensor]] = self._module.named_parameters()
        if with_buffers:
            named = chain(named, _saved_buffers(self._module))
        shared = {}
        for name, tensor in named:
            if tensor.is_meta or nn.parameter.is_lazy(tensor):
                continue  # held elsewhere, or not initialized yet
            ranks = tuple(self._ranks_of(name, tensor))
            if len(ranks) > 1 and (self._with_frozen or _kind_of(tensor) != "frozen parameter"):
                shared[name] = tensor, ranks
        return shared

    def _find(self, own: Mapping[str, tuple[Tensor, Ranks]], num_steps: Sequence[int]) -> ReplicaDifference | None:
        """Return the first tensor that differs between ranks with all micro-batches; copy what others missed."""
        held = {
            (name, ranks): _Held(int(digest_of_all(_plain_parts(tensor))), _kind_of(tensor), tuple(tensor.shape))
            for name, (tensor, ranks) in own.items()
        }
        rows: list[Mapping[tuple[str, Ranks], _Held]] = self._collectives.all_gather_object(held)
        for name, ranks in dict.fromkeys(key for row in rows for key in row):
            found = {rank: rows[rank].get((name, ranks)) for rank in ranks}
            digests = {rank: None if one is None else one.digest for rank, one in found.items()}
            if len(set(digests.values())) == 1:
                continue
            kinds = {one.kind for one in found.values() if one is not None}
            kind: Kind = "frozen parameter" if "frozen parameter" in kinds else kinds.pop()
            present = [rank for rank in ranks if num_steps[rank] == max(num_steps[each] for each in ranks)]
            is_here = name in own and own[name][1] == ranks
            tensor = own[name][0] if is_here else None
            if (
                kind == "frozen parameter"
                and digests[present[0]] is not None
                and len({digests[rank] for rank in present}) == 1
            ):
                self._copy(tensor, present[0])
                continue
            first = ranks[0]
            other = next(rank for rank in ranks if digests[rank] != digests[first])
            groups = tuple(tuple(r for r in ranks if digests[r] == digests[one]) for one in (first, other))
            index, values = self._values(tensor, found, first, other)
            return ReplicaDifference(name, kind, (groups[0], groups[1]), values, index)
        return None

    def _copy(self, parameter: Tensor | None, source: int) -> None:
        """Copy a parameter from one rank to those that hold it. Collective: every rank calls it."""
        own = [] if parameter is None else [part.detach() for part in _plain_parts(parameter)]
        received = self._collectives.broadcast(own, src=source)
        for part, value in zip(own, received, strict=False):
            part.copy_(value)

    def _values(
        self, tensor: Tensor | None, found: Mapping[int, _Held | None], first: int, other: int
    ) -> tuple[tuple[int, ...], tuple[object, object]]:
        """Return where the values of two ranks first differ, and these values. Collective: every rank calls it."""
        one, two = found[first], found[other]
        if one is None or two is None or one.shape != two.shape:
            described = tuple("missing" if each is None else f"of shape {list(each.shape)}" for each in (one, two))
            return (), (described[0], described[1])
        own = None if tensor is None else [part.detach().cpu() for part in _plain_parts(tensor)]
        theirs = self._collectives.broadcast(own, src=first)
        result: object = None
        if self._collectives.rank == other and own is not None:
            result = _first_difference(theirs, own)
        index, values = self._collectives.broadcast(result, src=other)
        return tuple(index), (values[0], values[1])


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict holds; the others may be caches of what a rank has computed."""
    for name, child in module.named_modules():
        for own, buffer in child.named_buffers(recurse=False):
            if is_persistent(child, own):
                yield (f"{name}.{own}" if name else own), buffer


def _kind_of(tensor: Tensor) -> Kind:
    if not isinstance(tensor, nn.Parameter):
        return "buffer"
    return "parameter" if tensor.requires_grad else "frozen parameter"


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of numbers that a rank holds of a tensor: several if it consists of other tensors."""
    if is_dtensor(tensor):
        return _plain_parts(local_shard(tensor))
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]


def _first_difference(theirs: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[list[int], tuple[object, object]]:
    """Return the index of the first element whose bits differ, and both values."""
    for one, two in zip(theirs, own, strict=True):
        places = (bits_of(one) != bits_of(two)).nonzero()
        if len(places):
            position = int(places[0]) * one.numel() // max(bits_of(one).numel(), 1)
            index = [int(place) for place in torch.unravel_index(torch.tensor(position), one.shape)]
            return index, (one.reshape(-1)[position].item(), two.reshape(-1)[position].item())
    return [], ("what it was", "what it was")


def _name_ranks(ranks: Ranks) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
