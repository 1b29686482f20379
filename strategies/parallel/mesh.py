"""Device mesh: the degrees of parallelism, and the ranks laid out by them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal

from ..errors import ConfigError

Replicas = int | Literal["nodes"]
"""The number of replicas; ``"nodes"`` means one for each node, and two on a single node."""


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism, from the outermost axis of the mesh to the innermost; their product is world_size.

    Neighbouring ranks, which are on one node, lie along the last axis, which communicates most. Each field is
    an axis: the mesh, `world_size` and the text follow the fields.
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    @classmethod
    def of(cls, world_size: int, num_nodes: int, replicate: Replicas) -> Degrees:
        """Return the degrees of `world_size` processes, which hold `replicate` replicas and shard each.

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
        return cls(number, world_size // number)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return prod(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return " x ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def make_mesh(device_type: str, degrees: Degrees) -> Any:
    """Return the DeviceMesh of all ranks, with an axis for each degree above 1. Collective: every rank calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    names = [field.name for field in fields(degrees) if getattr(degrees, field.name) > 1] or ["dp_shard"]
    if names == ["dp_replicate"]:  # torch takes a single axis for the sharded one
        names.append("dp_shard")
    shape = tuple(getattr(degrees, name) for name in names)
    return init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
