"""ShardedStrategy: the base of strategies under which each process keeps shards of the module's parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Unpack

from torch import nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .module.deferred_init import DeferredInit
from .module.precision import Precision
from .parallel.mesh import Degrees, make_mesh
from .parallel.sharding_policy import ShardingOptions, check_dimensions, check_gradients
from .placed.cuts import Cuts
from .placed.placed import Placed
from .placed.shards import PlacedShards, Sharding
from .pretrained.plain_builds import recording_builds
from .state.dtensor import is_dtensor
from .state.sendable import check_lookups, check_sendable, check_shapes, check_shardable, check_wrapped
from .state.shared_memory import check_unshared
from .strategy import MicroBatches, Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedStrategy(Strategy):
    """Train shards of a module; subclasses decide how ranks are laid out, and what happens before it is sharded.

    Args:
        options: see `ShardingOptions`.
        deferred_init: whether ``configure_model`` builds without allocating memory.
        settings: see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True
    forward_is_collective: ClassVar[bool] = True
    supports_restarts: bool = True

    _axes: ClassVar[Collection[str]] = ()
    """The axes that the mesh has even if their size is 1."""

    def __init__(self, options: ShardingOptions, *, deferred_init: bool, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = options
        self.deferred_init = deferred_init
        self.degrees = Degrees()
        """The degrees of parallelism; known after `validate`."""
        self._mesh: DeviceMesh | None = None
        self._deferred = DeferredInit()

    @abstractmethod
    def _find_degrees(self) -> Degrees:
        """Return the degrees of parallelism of all ranks."""

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.degrees = self._find_degrees()
        self.options.validate(self.degrees)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        degrees = self.degrees
        if trains and degrees.dp_replicate * degrees.dp_shard * degrees.cp > 1:
            check_lookups(module, self.name)
        if degrees.world_size > 1:
            self._check_dimensions(module)
            check_gradients(module)
            check_sendable(module, self.name)
            check_shardable(module, self.name, self._hardware.device_type)
            check_unshared(module, self.name, with_buffers=True)

    def _check_dimensions(self, module: nn.Module) -> None:
        if self.degrees.tp > 1 or self.degrees.pp > 1:
            check_dimensions(module)
        shards = self.degrees.dp_shard * self.degrees.cp
        check_wrapped(module, self.name, {"tp": self.degrees.tp, "pp": self.degrees.pp, "shards": shards})

    @property
    def keeps_shards_on_host(self) -> bool:
        """Whether shards are kept on the CPU, away from the device."""
        return self.options.cpu_offload and self._hardware.device_type != "cpu"

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.ranks.group is not None and self._mesh is None:
            self.degrees = self._find_degrees()
            self._mesh = make_mesh(self.device.type, self.degrees, axes=self._axes)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        return self.degrees.axes

    def init_context(self) -> AbstractContextManager[object]:
        self._deferred = DeferredInit()
        return (
            recording_builds(self._deferred) if self.deferred_init and self.ranks.group is not None else nullcontext()
        )

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        if self.ranks.group is None:
            return self.site.alone(module)
        own = self._last_placed
        if isinstance(own, PlacedShards) and own.holds(module):  # as when it is evaluated after it was trained
            self._place_again(own, is_manual=is_manual)
            return own
        if any(is_dtensor(p) for p in module.parameters()):
            raise ConfigError(
                f"{type(module).__name__} is sharded already, by a strategy other than this {type(self).__name__}; "
                "use the trainer that sharded it, or build a new module and load a checkpoint."
            )
        check_shapes(module)  # with what configure_model has built
        self._check_dimensions(module)
        check_sendable(module, self.name)
        check_shardable(module, self.name, self.device.type)
        check_unshared(module, self.name, with_buffers=True)
        assert self._mesh is not None, "connect() makes it where there are several ranks"
        sharding = Sharding(self._mesh, self.options, self._deferred, is_manual)
        self._deferred = DeferredInit()
        return self._shard(module, sharding)

    def _shard(self, module: nn.Module, sharding: Sharding) -> PlacedShards:
        """Shard a whole module. Collective."""
        return PlacedShards(self.site, module, sharding, Cuts())

    def _place_again(self, placed: PlacedShards, *, is_manual: bool) -> None:
        """Take a module that an earlier run has sharded into this one. Collective."""
        placed.begin_run(self.site, None, is_manual=is_manual)
