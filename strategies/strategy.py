"""Strategy: the interface between the training loop and the processes, in the order in which a run calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch
from torch import nn

from ..common.errors import ConfigError, RunError, not_set_up
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .devices.abilities import check_dtypes
from .devices.kinds import CPU
from .devices.queries import check_usable, set_current
from .distributed.process_group import START_TIMEOUT, ProcessGroup, ProcessSettings, check_settings
from .distributed.rank_methods import RankMethods
from .distributed.ranks import Ranks
from .launch.run_launcher import RunLauncher
from .module.loss_scaling import LossScaling
from .module.precision import Precision
from .placed.placed import Placed, Site
from .placed.placed_methods import PlacedMethods

MicroBatches: TypeAlias = int | Literal["vary", "unknown"]
"""The number of micro-batches of a full step; ``"vary"`` if steps differ in it, ``"unknown"`` before the data are."""


class Strategy(RankMethods, PlacedMethods):
    """Train a module in any number of processes: which there are, and how modules are placed on them.

    A run calls the methods in the order below. A subclass says what it needs before processes are started, and makes
    the `Placed` that computes steps, updates and state. The defaults suit one process and device.
    """

    name: ClassVar[str]
    """Its name in ``Trainer(strategy=...)``."""

    uses_many_devices: ClassVar[bool] = False
    """Whether ``devices="auto"`` means all devices rather than one."""
    uses_processes: ClassVar[bool] = False
    """Whether each device gets a process of its own."""
    forward_is_collective: ClassVar[bool] = False
    """Whether ranks communicate in forward: those without samples `stand_by` in all steps, and evaluation runs under
    ``torch.no_grad`` rather than in inference mode, whose tensors torch cannot shard."""

    supports_restarts: bool = False
    """Whether `ElasticStrategy` can contain it and restart its workers, also in a different number."""

    needs_trainer: ClassVar[bool] = False
    """Whether it relies on the Trainer's loop for more than its methods say, so that `Engine` cannot use it."""

    can_try_steps: bool = True
    """Whether a step can be undone: all that it changes is in the module, optimizers, loss scale and generators."""

    steps_alone: ClassVar[bool] = False
    """Whether ranks step with their own gradients and meet later, so that nothing is exchanged for a step."""

    # Known after `validate`:
    _hardware: Hardware
    precision: Precision
    """The dtypes in which the module computes; until then, ``32-true``."""
    launcher: RunLauncher
    """What starts the processes, unless a program such as torchrun has."""
    ranks: Ranks
    """The ranks of this process, and what launched it: a single process until then, all of the run after `connect`."""

    # Known after `connect`:
    device: torch.device
    """Where this process computes; until then, the CPU."""
    _scaling: LossScaling

    # Known after `place`:
    placed: Placed
    """The module that was placed last."""

    def __init__(self, **settings: Unpack[ProcessSettings]) -> None:
        """Take the process settings; a strategy without processes of its own has none."""
        self._process_settings = settings
        self.precision, self.device = Precision(), torch.device("cpu")
        self.ranks = Ranks.of(detect_environment({}), None, self.device)
        self.launcher = RunLauncher(self.ranks.environment)

    def __getattr__(self, name: str) -> Any:
        """Raise an error which says that an attribute declared above is not known before a run."""
        raise not_set_up(self, name)

    def __getstate__(self) -> dict[str, object]:
        """Return the state to copy or pickle; a strategy that has joined a process group has none.

        Raises:
            RunError: if it has joined one.
        """
        if self.ranks.group is not None:
            raise RunError(
                f"A strategy that has joined others, as rank {self.rank} of {self.world_size}, cannot be copied or "
                "pickled, nor can its trainer; copy it before its first run, or the module alone."
            )
        return dict(self.__dict__)

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        """Check that this strategy can run on this hardware; called in the user's process, before `launch`.

        Raises:
            ConfigError: if it cannot.
        """
        check_dtypes(hardware.device_type, precision.name, precision.param_dtype, precision.autocast_dtype)
        self._hardware, self.precision = hardware, precision
        environment = hardware.environment
        self.ranks = replace(self.ranks, environment=environment)
        self.launcher = self._make_launcher()
        has_several = environment.world_size > 1
        if self.uses_processes:
            check_settings(self._process_settings, hardware.device_type, is_needed=has_several, of=type(self))
        elif has_several:
            remedy = "start one process" if environment.is_external else "set devices=1 and num_nodes=1"
            raise ConfigError(
                f"strategy={self.name!r} runs in one process, but there are {environment.world_size} "
                f"({environment.describe()}); use a strategy for several, such as 'ddp', or {remedy}."
            )

    def _make_launcher(self) -> RunLauncher:
        start_timeout = self._process_settings.get("start_timeout", START_TIMEOUT)
        uses_devices = self._hardware.device_type != CPU
        return RunLauncher(self.ranks.environment, uses_devices=uses_devices, start_timeout=start_timeout)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        """Raise a `ConfigError` if the module as built so far cannot run, or train, here; in the user's process.

        `micro_batches` is the number of those in each full step.
        """

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        """Take the device and join the process group. Collective: every rank calls it."""
        environment = detect_environment() if self.uses_processes else self.ranks.environment
        has_peers = self.uses_processes and environment.world_size > 1
        if not has_peers:
            environment = self.ranks.environment
        self._hardware, self.precision = hardware, precision
        self.device = hardware.device(environment.local_rank)
        set_current(self.device)  # this thread's default for streams, events and collectives
        for device in [self.device] if self.uses_processes else hardware.list_devices():
            check_usable(device)
        group = ProcessGroup(environment, self.device, **self._process_settings) if has_peers else None
        if group is not None:
            group.join()
        self.ranks = Ranks.of(environment, group, self.device)
        self._scaling = LossScaling(precision.make_scaler(self.device), self.device)

    def annotate(self, error: BaseException) -> None:
        """Add notes to an error of a run: its cause if this strategy knows it, and what sets the ranks at fault apart.

        Called in the process where it was raised, and with a `ProcessError`, which names ranks, in the user's.
        """
        if self._last_placed is not None:
            self._last_placed.annotate(error)

    def close(self) -> None:
        """Release the module; also called after a failed run. The process group is kept for the next run."""
        if self._last_placed is not None:
            self._last_placed.close()

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices on which this process computes."""
        return (self.device,)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The degrees of parallelism above 1, by mesh axis, for checkpoint manifests."""
        return {"dp_replicate": self.world_size} if self.world_size > 1 else {}

    def init_context(self) -> AbstractContextManager[object]:
        """Return the context in which ``configure_model`` runs, for a strategy that decides where layers are built."""
        return nullcontext()

    @property
    def site(self) -> Site:
        """Where modules are placed; known after `connect`."""
        return Site(self.name, self.ranks, self.device, self.precision, self._scaling)

    def place(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        """Place the module on the ranks, and return what computes its steps; build optimizers from its parameters then.

        With `is_manual`, the step itself computes gradients and updates. Collective: every rank calls it.
        """
        self.placed = self.make_placed(module, is_manual=is_manual)
        return self.placed

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        """Move, convert, wrap or shard the module for `place`, which users call; by default, move and convert it."""
        return self.site.alone(module)

    @property
    def _last_placed(self) -> Placed | None:
        """The module that was placed last, if any was."""
        return vars(self).get("placed")

    @property
    def max_lead(self) -> int:
        """The number of steps by which one rank may be ahead of another."""
        return 0
