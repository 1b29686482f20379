"""Process group of a run: its settings, its store, and how its processes meet."""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, Unpack

import torch

from ...common.errors import ConfigError, ProcessError, did_you_mean
from ..cluster.environment import LOOPBACK, Environment, set_defaults
from ..cluster.network import loopback_variables, variables_towards
from ..cluster.start_wait import StartWait, unknown_host
from ..cluster.tcp_store import connect_store, host_store
from ..cluster.torchrun import agent_hosts_store
from ..devices.backends import backend_for, beside_gloo, binds_devices, check_several_processes
from ..torch_internals.distributed import find_default_store

if TYPE_CHECKING:
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import Store

START_TIMEOUT: Final = timedelta(minutes=5)
"""The default time for which processes wait for each other at the start."""
# torch's default for gloo; a checkpoint, a download or a first compilation can keep a rank busy for a long time
_TIMEOUT: Final = timedelta(minutes=30)

_PARTS: Final[dict[tuple[object, ...], tuple[Any, Any]]] = {}
"""torch's CPU and device groups for subsets of ranks; later runs in this process reuse them."""

_FAREWELL: Final = 60.0  # seconds for which rank 0, at exit, keeps the store alive for slower ranks
_FAREWELL_OF_FAILED: Final = 5.0  # the same, after a failure
_LOOK: Final = 0.02
_SHOWN: Final = 20


class ProcessSettings(TypedDict, total=False):
    """Keyword arguments of every strategy with several processes."""

    process_group_backend: str | None
    """``"nccl"``, ``"gloo"`` or another that torch knows; by default torch's own choice for the device."""
    timeout: timedelta
    """How long a collective waits for a rank that is alive; a rank that dies is noticed at once."""
    start_timeout: timedelta
    """How long the processes wait for each other at the start."""
    check_collectives: bool
    """Compare every collective of `Strategy` across ranks before it runs: slow, but a mismatch raises, not hangs."""


def check_settings(settings: ProcessSettings, device_type: str, *, is_needed: bool, of: type = object) -> None:
    """Check the settings before any process starts; the backend is checked only if one is needed.

    Args:
        settings: what was given by keyword.
        device_type: where the module will be.
        is_needed: whether there are several processes.
        of: the class that was given the settings; a wrong name may have meant another of its arguments.

    Raises:
        ConfigError: for an unknown setting, or a backend that this build of torch or the device does not support.
    """
    known = ProcessSettings.__annotations__
    for name in settings:
        if name not in known:
            given = dict(settings)[name]
            raise ConfigError(
                f"{of.__name__} has no argument {name!r} (given as {given!r:.80})."
                f"{did_you_mean(name, [*known, *_own_arguments(of)])}"
            )
    for name, value in (("timeout", settings.get("timeout")), ("start_timeout", settings.get("start_timeout"))):
        if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
            raise ConfigError(
                f"{name} must be a timedelta above zero, got {value!r}; give timedelta(minutes=5), for example."
            )
    if not is_needed:
        return
    check_several_processes(device_type)
    backend_for(device_type, settings.get("process_group_backend"))


def _own_arguments(of: type) -> list[str]:
    """Return the names of a class's arguments, except for those that it hands on."""
    parameters = inspect.signature(of).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def backend_options(backend: str, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` for a backend.

    One that sends from devices only is combined with gloo for CPU tensors, which exist where parameters are offloaded.
    NCCL is also given its device: it would otherwise guess from the first tensor, and create contexts on the first GPU
    for the other ranks. Others take this thread's current device.
    """
    name = beside_gloo(backend, device.type)
    is_bound = name != backend and binds_devices(device.type)
    return {"backend": name, "device_id": device} if is_bound else {"backend": name}


class ProcessGroup:
    """torch's process group, with a gloo group beside it for CPU tensors; it lives until the process ends.

    Args:
        environment: the rank and the addresses of this process.
        device: the device of its tensors.
        settings: see `ProcessSettings`.
    """

    def __init__(self, environment: Environment, device: torch.device, **settings: Unpack[ProcessSettings]) -> None:
        self.environment = environment
        self.device = device
        self.settings = settings
        self.backend = backend_for(device.type, settings.get("process_group_backend"))
        self.rank, self.world_size = environment.rank, environment.world_size
        self.local_rank, self.local_world_size = environment.local_rank, environment.local_world_size
        self.node_rank = environment.node_rank
        self.ranks: Sequence[int] = range(self.world_size)
        """The global ranks of its members."""
        self.device_group: dist.ProcessGroup | None = None
        """torch's group for tensors on the device; None for the default group of all ranks."""
        self.has_failed = False
        """Whether a run has failed on this rank, so that others may be dead."""

    def join(self) -> None:
        """Join the other processes. Collective: every rank calls it.

        An existing group is reused, whether it is from an earlier run, from Ray or from the user.

        Raises:
            ProcessError: naming the ranks that did not join within the start timeout.
        """
        from torch import distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        if dist.is_initialized():
            self._check_existing()
        else:
            self._meet()
        self.store: Store = PrefixStore("echelon", find_default_store())
        is_cpu = dist.get_backend() == "gloo" or self.is_fake
        # for CPU tensors and objects, and for everything that must not make the GPU wait
        self.cpu_group: Any = dist.group.WORLD if is_cpu else dist.new_group(backend="gloo", timeout=self.timeout)
        self.nodes: Sequence[int] = [self.node_rank] * self.world_size
        """The node of each rank of the run."""
        if self.environment.num_nodes > 1 and not self.is_fake:
            group: Any = self.cpu_group
            nodes = list(self.nodes)
            dist.all_gather_object(nodes, self.node_rank, group)
            self.nodes = nodes

    @property
    def is_first_on_node(self) -> bool:
        """Whether this is the first rank of the run on its node, which does what is done there once."""
        rank = self.ranks[self.rank]
        return self.nodes.index(self.nodes[rank]) == rank

    def among(self, partition: Sequence[Sequence[int]]) -> Self:
        """Return the group for the part of a partition that contains this rank. Collective: every rank calls it."""
        from torch import distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        part = copy.copy(self)
        has_one_backend = self.cpu_group is (self.device_group or dist.group.WORLD)
        for members in partition:  # torch requires every rank to make every group, in the same order
            key = dist.group.WORLD, has_one_backend, self.timeout, *members
            if key not in _PARTS:
                backend = "fake" if self.is_fake else "gloo"
                cpu_group = dist.new_group(members, timeout=self.timeout, backend=backend)
                device_group = cpu_group if has_one_backend else dist.new_group(members, timeout=self.timeout)
                _PARTS[key] = cpu_group, device_group
            if self.ranks[self.rank] in members:
                part.ranks, part.rank, part.world_size = members, members.index(self.ranks[self.rank]), len(members)
                part.cpu_group, part.device_group = _PARTS[key]
                part.store = PrefixStore(f"ranks {','.join(map(str, members))}", self.store)
        return part

    @property
    def is_fake(self) -> bool:
        """Whether the other processes do not exist, and torch's fake group stands in for them."""
        from torch import distributed as dist

        return dist.is_initialized() and dist.get_backend() == "fake"

    @property
    def timeout(self) -> timedelta:
        """How long a collective waits for a rank that is alive."""
        return self.settings.get("timeout", _TIMEOUT)

    def _check_existing(self) -> None:
        from torch import distributed as dist

        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise ConfigError(
                f"torch.distributed is already initialized, with rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but this process was started as rank {self.rank} of {self.world_size}; leave init_process_group to "
                "the trainer, or pass it the same numbers."
            )

    def _meet(self) -> None:
        from torch import distributed as dist

        limit = self.settings.get("start_timeout", START_TIMEOUT)
        store = self._open_store(limit)
        sends_by = f"{self.device.type} ({self.backend})"
        store.add(f"echelon/start/{sends_by}", 1)
        store.set(f"echelon/start/{self.rank}", f"{sends_by} {socket.gethostname()}")
        self._await_others(store, limit)
        if store.add(f"echelon/start/{sends_by}", 0) < self.world_size:  # torch's groups would wait for each other
            raise self._unlike(store)
        is_one_machine = self.environment.num_nodes == 1
        set_defaults(loopback_variables() if is_one_machine else variables_towards(self.environment.main_address))
        dist.init_process_group(
            **backend_options(self.backend, self.device),
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
        )
        # a Finalize, unlike atexit, also runs in processes of multiprocessing, such as the workers of a launch
        Finalize(None, partial(self._say_farewell, store), exitpriority=0)
        atexit.register(_leave_group)

    def _await_others(self, store: Store, limit: timedelta) -> None:
        """Wait until every rank has posted its arrival; rank 0 says now and then who is missing."""
        keys = [f"echelon/start/{rank}" for rank in range(self.world_size)]

        def missing() -> str:
            ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
            more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
            return f"rank {', '.join(map(str, ranks[:_SHOWN]))}{more}"

        wait = StartWait(limit, is_told=self.rank == 0)
        while True:
            try:
                # not a Noticeboard: thousands of ranks would poll it
                store.wait(keys, timedelta(seconds=wait.until_due()))
                return
            except RuntimeError as error:
                if not wait.left():
                    num_missing = sum(not store.check([key]) for key in keys)
                    raise ProcessError(
                        f"Only {self.world_size - num_missing} of {self.world_size} processes connected within "
                        f"{limit.total_seconds():.0f} s; missing: {missing()}. Start them too, look at their output to "
                        "see why they ended, or raise the strategy's start_timeout."
                    ) from error
            address = f"{self.environment.main_address}:{self.environment.main_port}"
            wait.tell(lambda: f"{missing()} of {self.world_size} processes to connect to {address}")  # noqa: B023

    def _unlike(self, store: Store) -> ConfigError:
        """Return the error of ranks whose devices or backends differ; each rank says the same."""
        others: dict[str, tuple[int, str]] = {}
        for rank, posted in enumerate(store.multi_get([f"echelon/start/{rank}" for rank in range(self.world_size)])):
            sends_by, _, host = posted.decode().rpartition(" ")
            others.setdefault(sends_by, (rank, host))
        first, *unlike = (f"rank {rank} on {host} has {sends_by}" for sends_by, (rank, host) in others.items())
        return ConfigError(
            f"Ranks have devices of different types or backends: {first}, but {' and '.join(unlike)}. See why a device "
            "is missing there (`echelon doctor`), or give each the same accelerator and process_group_backend."
        )

    def _say_farewell(self, store: Store) -> None:
        """Tell rank 0 that this rank no longer needs the store; if rank 0 hosts it, rank 0 waits for the others."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            num_left = store.add("echelon/left", 1)
            end = time.monotonic() + (_FAREWELL_OF_FAILED if self.has_failed else _FAREWELL)
            while self._hosts_store and num_left < self.world_size and time.monotonic() < end:
                time.sleep(_LOOK)
                num_left = store.add("echelon/left", 0)

    @property
    def _hosts_store(self) -> bool:
        return self.rank == 0 and not (self.environment.launcher == "torchrun" and agent_hosts_store())

    def _open_store(self, limit: timedelta) -> Any:
        from torch.distributed.rendezvous import rendezvous

        environment, port = self.environment, self.environment.main_port
        is_one_machine = environment.num_nodes == 1
        address = LOOPBACK if is_one_machine else environment.main_address
        try:
            if environment.launcher == "torchrun" and agent_hosts_store():
                return next(rendezvous("env://", self.rank, self.world_size, timeout=limit))[0]
            if self._hosts_store:  # torch's own store would listen on all interfaces
                return host_store(address, port or 0, limit)
            told = StartWait(limit, is_told=self.local_rank == 0)
            with told.telling(lambda: f"rank 0, whose store is to be at {address}:{port}{unknown_host(address)}"):
                return connect_store(address, port or 0, limit)
        except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
            raise ProcessError(
                f"Rank {self.rank} cannot {'open' if self.rank == 0 else 'reach'} the store of the run at "
                f"{address}:{port} ({error}); check that rank 0 runs there, and set MASTER_PORT to a free port that no "
                "firewall blocks."
            ) from error


def _leave_group() -> None:
    from torch import distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
