"""Backends of collectives: which one torch has for a type of device, and which it has at all."""

from __future__ import annotations

from typing import Final

from ...common.errors import ConfigError, did_you_mean
from .kinds import CPU

_FAKE: Final = "fake"
_ONE_PROCESS: Final = {"mps": "has one device and no backend for several processes; use 'cpu'"}
"""Devices that torch names a backend for, which cannot compute on them."""


def check_several_processes(device_type: str) -> None:
    """Check that processes with a device of this type each can train together.

    Raises:
        ConfigError: if torch has no collectives for it.
    """
    from torch import distributed as dist

    reason = _ONE_PROCESS.get(device_type)
    if reason is None and device_type not in dist.Backend.default_device_backend_map:
        reason = (
            "has no backend for several processes: nobody has registered one in torch.distributed; import the package "
            "that does, set devices=1, or use 'cpu'"
        )
    if reason is not None:
        raise ConfigError(f"accelerator={device_type!r} {reason}.")


def backend_for(device_type: str, given: str | None = None) -> str:
    """Return the backend of collectives for a type of device: the one that was given, or torch's default.

    Raises:
        ConfigError: for one that torch does not know, that this build lacks, or that cannot send from such a device.
    """
    from torch import distributed as dist

    default = dist.get_default_backend_for_device(device_type)
    name = given or default
    known = [one for one in dist.Backend.backend_capability if one != _FAKE]
    if name not in known:
        raise ConfigError(f"process_group_backend={name!r} is not known.{did_you_mean(name, known)}")
    if not dist.is_backend_available(name):
        raise ConfigError(
            f"process_group_backend={name!r}, but this build of torch was built without it; use {default!r}"
            + (", which mpirun can start as well." if name == "mpi" else ".")
        )
    sends_from = dist.Backend.backend_capability[name]
    if device_type not in sends_from:
        raise ConfigError(
            f"process_group_backend={name!r} needs GPUs, got accelerator={device_type!r}; use {default!r}."
            if device_type == CPU
            else f"process_group_backend={name!r} sends from {' and '.join(sends_from)} only, got "
            f"accelerator={device_type!r}; use {default!r}."
        )
    return name


def has_backend(device_type: str) -> bool:
    """Return whether this build of torch has collectives for a type of device."""
    from torch import distributed as dist

    name = dist.Backend.default_device_backend_map.get(device_type)
    return name is not None and dist.is_backend_available(name)


def binds_devices(device_type: str) -> bool:
    """Return whether a group that was bound to a device of this type can have groups of gloo's beside it.

    torch (2.14) asks each for its backend of that device, and gloo answers for CUDA's only.
    """
    from torch import distributed as dist

    return device_type in dist.Backend.backend_capability[dist.Backend.GLOO]


def beside_gloo(backend: str, device_type: str) -> str:
    """Return what torch calls a group that uses gloo for tensors on the CPU and a backend for those of a device."""
    from torch import distributed as dist

    if CPU in dist.Backend.backend_capability[backend]:
        return backend
    return f"{CPU}:{dist.Backend.GLOO},{device_type}:{backend}"
