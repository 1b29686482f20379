"""ParameterServerStrategy: trainers compute gradients; servers beside them hold the parameters and update them."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Final, Literal, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, RunError
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.ddp_options import DDPOptions
from .parallel.equal_ranks import overrides_hook
from .placed.on_servers import PlacedOnServers, check_served
from .servers.choices import ServerChoices
from .servers.connection import Connection, Timeouts
from .servers.processes import prepare_nursery
from .servers.remote_calls import RemoteCalls
from .servers.tables import RemoteTables
from .state.sendable import check_lookups
from .strategy import MicroBatches

_PUSH_TIMEOUT: Final = timedelta(minutes=30)  # torch's default for gloo


class ParameterServerStrategy(ReplicaStrategy, RemoteCalls):
    """Train replicas whose parameters and optimizer state are held, and updated, by servers.

    Servers are not ranks: they are processes beside the trainers, started by the first trainer of the first node, and
    ended with it in any case. In sync mode the servers average the gradients of all trainers, and a step equals that of
    one process. In async mode each trainer's push is an update of its own, applied as soon as it comes. Hooks and
    callbacks see the gradients of their rank. Each server gets whole tensors, balanced by their bytes. Checkpoints are
    the same as with every other strategy.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014; for async mode Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.

    Args:
        servers: how many there are; ``"nodes"`` for one on each node.
        mode: ``"sync"`` or ``"async"``.
        max_staleness: in async mode, how many steps a trainer may be ahead of the slowest; 0 is sync mode.
        dense: who updates all but `RemoteEmbedding` tables: the ``"servers"``, or with ``"ddp"`` the trainers, each
            with gradients averaged as in `DDPStrategy`. Only with ``"ddp"`` do tables stay on the servers.
        answer_timeout: how long a server or trainer may give no sign of life before the run ends.
        ddp: how gradients are synchronized with ``dense="ddp"``.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy=ParameterServerStrategy(servers=2), devices=2, accelerator="cpu")
    """

    name: ClassVar[str] = "ps"
    can_try_steps: bool = False

    def __init__(
        self,
        servers: int | Literal["nodes"] = 1,
        *,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int | None = None,
        dense: Literal["servers", "ddp"] = "servers",
        answer_timeout: timedelta = timedelta(seconds=10),
        ddp: DDPOptions | None = None,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        super().__init__(ddp, **settings)
        self.choices = ServerChoices(servers, mode, max_staleness, dense, answer_timeout)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "placed"}

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.choices.validate(self.ranks.environment, uses_scaler=precision.uses_scaler)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        if not trains:  # without servers
            return
        if self.ranks.environment.world_size > 1:
            check_lookups(module, self.name)
        if not getattr(module, "automatic_optimization", True):
            raise ConfigError(
                "strategy='ps' needs automatic optimization, because its servers update the parameters, got a module "
                "with automatic_optimization=False; use strategy='ddp', or let the trainer step the optimizers."
            )
        if not overrides_hook(module, "configure_model"):
            tables = None if self.choices.serves_all else RemoteTables(module)
            check_served(module, tables, self.choices, self.num_servers)

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        if detect_environment().local_rank == 0:
            prepare_nursery()
        super().connect(hardware, precision)

    @property
    def max_lead(self) -> int:
        return self.choices.bound or 0

    @property
    def num_servers(self) -> int:
        """The number of servers, on all nodes."""
        return self.choices.number_on(self.ranks.environment.num_nodes)

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> PlacedOnServers:
        self._convert(module)
        settings = self._process_settings
        return PlacedOnServers(
            self.site,
            module,
            choices=self.choices,
            options=self.options,
            timeouts=Timeouts(
                self.launcher.start_timeout, self.choices.answer_timeout, settings.get("timeout", _PUSH_TIMEOUT)
            ),
            outlives_run=not self.launcher.starts_processes,
            is_manual=is_manual,
        )

    @property
    def _served(self) -> PlacedOnServers | None:
        return self._last_placed if isinstance(self._last_placed, PlacedOnServers) else None

    @property
    def _connection(self) -> Connection | None:
        return None if self._served is None else self._served.connection

    @property
    def traffic(self) -> int:
        """The bytes of tensors that this trainer has sent to the servers and received from them, in this fit.

        Raises:
            RunError: outside of a fit.
        """
        if self._connection is None:
            raise RunError("strategy.traffic needs a running fit, found none; read it in a hook.")
        return self._connection.sent + self._connection.received

    def ledger(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return the record of every push of an optimizer (by default the first) in a fit in async mode.

        Each row has the trainer, how many pushes it had made before, how many steps it is ahead of the slowest
        trainer with this one, and how many pushes of others came between its pull and this push.

        Raises:
            RunError: outside of a fit in async mode.
        """
        served = {} if self._served is None else self._served.served
        if self._connection is None or self.choices.bound is None or not served:
            raise RunError("strategy.ledger() needs a running fit in async mode, found none; call it in a hook.")
        return served[optimizer if optimizer is not None else next(iter(served))].ledger()
