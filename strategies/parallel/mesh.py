"""Device mesh: the degrees of parallelism, and how they lay out the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from ...common.errors import ConfigError
from ..torch_internals.dtensors import forget_meshes, tell_compiled_shards_apart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Replicas = int | Literal["nodes"]
"""The number of replicas; ``"nodes"`` means one per node, or two on a single node."""
Degree = int | Literal["auto", "nodes"]
"""A degree of parallelism; ``"auto"`` is what the others leave of world_size, ``"nodes"`` the number of nodes."""


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism, from the outermost axis of the mesh to the innermost; their product is world_size.

    The last axis communicates most, so neighboring ranks, which share a node, lie along it. Each field is an axis: the
    mesh, `world_size`, the ranks along an axis and the string form follow from the fields. Experts are dealt over ranks
    of dp_shard, and are no axis of their own here.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, world_size: int, num_nodes: int, replicate: Replicas) -> Degrees:
        """Return the degrees of `world_size` processes that hold `replicate` replicas, each of them sharded.

        Raises:
            ConfigError: for a number of replicas that does not divide `world_size`.
        """
        number = (num_nodes if num_nodes > 1 else 2) if replicate == "nodes" else replicate
        if isinstance(number, bool) or not isinstance(number, int) or number < 1 or world_size % number:
            divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
            meant = "" if number == replicate else f" (which is {number} here)"
            raise ConfigError(
                f"replicate must divide world_size={world_size}, got {replicate!r}{meant}; give one of {divisors}."
            )
        return cls(dp_replicate=number, dp_shard=world_size // number)

    @classmethod
    def fit(cls, world_size: int, num_nodes: int, given: Mapping[str, Degree]) -> Degrees:
        """Return the degrees of `world_size` processes, given degrees of which at most one is ``"auto"``.

        Raises:
            ConfigError: for degrees whose product is not `world_size`.
        """
        check_degrees(given)
        fixed = {axis: num_nodes if degree == "nodes" else degree for axis, degree in given.items()}
        open_axes = [axis for axis, degree in fixed.items() if degree == "auto"]
        numbers = {axis: int(degree) for axis, degree in fixed.items() if axis not in open_axes}
        number = prod(numbers.values())
        if world_size % number or (number != world_size and not open_axes):
            names = " * ".join(axis for axis in numbers if numbers[axis] > 1) or " * ".join(numbers)
            product_of = f"divides {world_size}" if open_axes else f"is {world_size}"
            raise ConfigError(
                f"{names} = {number}, but world_size is {world_size}; choose degrees whose product {product_of}."
            )
        return cls(**numbers, **dict.fromkeys(open_axes, world_size // number))

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return prod(self._sizes.values())

    @property
    def axes(self) -> dict[str, int]:
        """The degrees above 1, by axis."""
        return {axis: size for axis, size in self._sizes.items() if size > 1}

    def along(self, rank: int, axes: Collection[str]) -> list[int]:
        """Return the ranks that differ from `rank` only along these axes, itself included, in ascending order."""
        own = self._coordinate(rank)
        spans = [range(size) if axis in axes else [own[axis]] for axis, size in self._sizes.items()]
        return [self._rank(place) for place in product(*spans)]

    def place(self, rank: int, axes: Collection[str]) -> int:
        """Return the position of `rank` among the ranks `along` these axes."""
        return self.along(rank, axes).index(rank)

    def _coordinate(self, rank: int) -> dict[str, int]:
        place = {}
        for axis, size in reversed(self._sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def _rank(self, place: Collection[int]) -> int:
        rank = 0
        for at, size in zip(place, self._sizes.values(), strict=True):
            rank = rank * size + at
        return rank

    @property
    def _sizes(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self._sizes.items() if axis in _ALWAYS or size > 1)


_ALWAYS = ("dp_replicate", "dp_shard")


def check_degrees(given: Mapping[str, Degree]) -> None:
    """Check degrees as far as possible without knowing the number of processes.

    Raises:
        ConfigError: for a degree that is not a positive int, ``"auto"`` or ``"nodes"``, or for a second ``"auto"``.
    """
    for axis, degree in given.items():
        is_number = isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
        if not is_number and degree not in ("auto", "nodes"):
            raise ConfigError(f"{axis} must be >= 1, 'auto' or 'nodes', got {degree!r}; give a number of ranks.")
    open_axes = [axis for axis, degree in given.items() if degree == "auto"]
    if len(open_axes) > 1:
        raise ConfigError(
            f"At most one degree can be 'auto', got {' and '.join(open_axes)}; give a number for the others."
        )


def make_mesh(device_type: str, degrees: Degrees, *, axes: Collection[str] = (), ep: int = 1) -> DeviceMesh:
    """Return the DeviceMesh of all ranks. Collective: every rank calls it.

    The axis ``dp_shard`` is always there and includes cp, since parameters are sharded over both; any other axis is
    there if it is above 1 or in `axes`. With `ep`, it is the mesh of experts, with an axis ``ep`` of neighbors among
    the ranks of ``dp_shard``, each of which is left an `ep`-th of these. With pipeline stages, the axes other than pp
    get names of their own: torch treats two meshes with the same ranks and names as one, whatever they are part of, but
    each stage holds parameters that no other has.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {
        "pp": degrees.pp,
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard * degrees.cp // ep,
        "ep": ep,
        "tp": degrees.tp,
    }
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard" or axis in axes}
    if degrees.pp > 1:
        sizes = {axis if axis == "pp" else in_stage(axis): size for axis, size in sizes.items()}
    tell_compiled_shards_apart()
    forget_meshes()
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def in_stage(axis: str) -> str:
    """Return the name of an axis in a mesh with pipeline stages."""
    return f"{axis}_in_stage"


DATA_AXES: Final = ("dp_replicate", "dp_shard", in_stage("dp_replicate"), in_stage("dp_shard"))
"""The axes of a mesh over which parameters are sharded or repeated."""
