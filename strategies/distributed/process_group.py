"""Process group of a run: its settings, its store, and the meeting of its processes."""

from __future__ import annotations

import atexit
import socket
from datetime import timedelta
from typing import Any, Final, TypedDict, Unpack

import torch

from ..cluster.environment import LOOPBACK, Environment, set_defaults
from ..cluster.network import variables_towards
from ..cluster.tcp_store import host_store
from ..errors import ConfigError, ProcessError, did_you_mean

START_TIMEOUT: Final = timedelta(minutes=5)
"""How long processes wait for each other at the start, by default."""
# torch's default for gloo; a checkpoint, a download or a first compilation may keep a rank busy for long
_TIMEOUT: Final = timedelta(minutes=30)


class ProcessSettings(TypedDict, total=False):
    """Keyword arguments of every strategy with several processes."""

    process_group_backend: str | None
    """``"nccl"``, ``"gloo"`` or ``"mpi"``; by default nccl on CUDA and gloo on CPU, as torch's documentation says."""
    timeout: timedelta
    """How long a collective waits for a rank that is alive; a rank that died is noticed at once."""
    start_timeout: timedelta
    """How long the processes wait for each other at the start."""
    check_collectives: bool
    """Compare every collective of `Strategy` across ranks before it runs: slow, but an error instead of a hang."""


def check_settings(settings: ProcessSettings, device_type: str, *, is_needed: bool) -> None:
    """Check the settings before any process starts; the backend only if one is needed.

    Raises:
        ConfigError: for an unknown setting, or a backend that this build of torch, or the device, cannot use.
    """
    known = ProcessSettings.__annotations__
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name!r} is not a setting of a strategy with processes.{did_you_mean(name, known)}")
    for name, value in (("timeout", settings.get("timeout")), ("start_timeout", settings.get("start_timeout"))):
        if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
            raise ConfigError(
                f"{name} must be a timedelta above zero, got {value!r}; give timedelta(minutes=5), for example."
            )
    if not is_needed:
        return
    if device_type == "mps":
        raise ConfigError("accelerator='mps' has one device and no backend for several processes; use 'cpu'.")
    _backend(settings, device_type)


def _backend(settings: ProcessSettings, device_type: str) -> str:
    from torch import distributed as dist

    default = "nccl" if device_type == "cuda" else "gloo"
    name = settings.get("process_group_backend") or default
    if name not in ("nccl", "gloo", "mpi"):
        raise ConfigError(f"process_group_backend={name!r} is not known.{did_you_mean(name, ('nccl', 'gloo', 'mpi'))}")
    if not getattr(dist, f"is_{name}_available")():
        raise ConfigError(
            f"process_group_backend={name!r}, but this build of torch ({torch.__version__}) was built without it; "
            f"use {default!r}" + (", which mpirun can start as well." if name == "mpi" else ".")
        )
    if name == "nccl" and device_type != "cuda":
        raise ConfigError(f"process_group_backend='nccl' needs GPUs, got accelerator={device_type!r}; use 'gloo'.")
    return name


class ProcessGroup:
    """torch's process group with gloo for tensors on the CPU beside it; it exists until the process ends.

    Args:
        environment: rank and addresses of this process.
        device: the device of its tensors.
        settings: see `ProcessSettings`.
    """

    def __init__(self, environment: Environment, device: torch.device, **settings: Unpack[ProcessSettings]) -> None:
        self.environment = environment
        self.device = device
        self.settings = settings
        self.backend = _backend(settings, device.type)
        self.rank, self.world_size = environment.rank, environment.world_size
        self.local_rank, self.local_world_size = environment.local_rank, environment.local_world_size
        self.node_rank = environment.node_rank

    def join(self) -> None:
        """Meet the other processes. Collective: every rank calls it.

        An existing group is used: that of an earlier run, of Ray, or of the user.

        Raises:
            ProcessError: naming the ranks that did not come within the start timeout.
        """
        from torch import distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            self._check_existing()
        else:
            self._meet()
        self.store: Any = PrefixStore("echelon", dist.distributed_c10d._get_default_store())
        is_cpu = dist.get_backend() == "gloo"
        # for CPU tensors and objects, and for all that must not make the GPU wait
        self.cpu_group: Any = dist.group.WORLD if is_cpu else dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def _timeout(self) -> timedelta:
        return self.settings.get("timeout", _TIMEOUT)

    def _check_existing(self) -> None:
        from torch import distributed as dist

        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise ConfigError(
                f"torch.distributed is initialised already, with rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but this process was started as rank {self.rank} of {self.world_size}; leave init_process_group to "
                "the trainer, or pass it the same numbers."
            )

    def _meet(self) -> None:
        from torch import distributed as dist

        limit = self.settings.get("start_timeout", START_TIMEOUT)
        store = self._open_store(limit)
        store.set(f"echelon/start/{self.rank}", socket.gethostname())
        keys = [f"echelon/start/{rank}" for rank in range(self.world_size)]
        try:
            store.wait(keys, limit)  # not a Noticeboard: thousands of ranks would poll it
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ProcessError(
                f"Only {self.world_size - len(missing)} of {self.world_size} processes came within "
                f"{limit.total_seconds():.0f} s; missing: rank {', '.join(map(str, missing))}. Start them too, look at "
                "their output to see why they ended, or wait longer with start_timeout of the strategy."
            ) from error
        if self.environment.num_nodes > 1:
            set_defaults(variables_towards(self.environment.main_address))
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self._timeout
        )
        atexit.register(_leave)

    def _open_store(self, limit: timedelta) -> Any:
        from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

        environment, port = self.environment, self.environment.main_port
        is_one_machine = environment.num_nodes == 1
        address = LOOPBACK if is_one_machine else environment.main_address
        try:
            if environment.launcher == "torchrun":  # torch knows whether its agent or rank 0 hosts the store
                return next(rendezvous("env://", self.rank, self.world_size, timeout=limit))[0]
            if self.rank == 0 and is_one_machine:
                return host_store(address, port or 0, limit)
            return TCPStore(address, port or 0, is_master=self.rank == 0, timeout=limit, wait_for_workers=False)
        except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
            raise ProcessError(
                f"Rank {self.rank} cannot {'open' if self.rank == 0 else 'reach'} the store of the run at "
                f"{address}:{port} ({error}); check that rank 0 runs there, and set MASTER_PORT to a free port that no "
                "firewall blocks."
            ) from error


def _leave() -> None:
    from torch import distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
