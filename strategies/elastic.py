"""ElasticStrategy: another strategy whose workers are restarted after faults and when nodes join or leave."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .module.precision import Precision
from .registry import STRATEGIES, find_strategy
from .resilience.elastic_launcher import ElasticLauncher, ElasticOptions
from .resilience.faults import Chaos
from .resilience.hang_detection import Limits
from .resilience.restart_policy import RestartPolicy
from .resilience.supervisor import ElasticSettings
from .strategy import Strategy


class ForwardingStrategy(Strategy):
    """Forwards the whole interface of `Strategy` to an inner strategy; subclasses override parts of it.

    Each member is a property that returns the inner strategy's, so new members are forwarded too.
    """

    def __init__(self, inner: Strategy) -> None:
        # no super().__init__(): the fields are the inner strategy's
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner strategy that `Strategy` does not have."""
        if name == "inner":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def positions(self, length: int) -> Tensor:
        return self.inner.positions(length)


def forward_members(kind: type, base: type) -> None:
    """Give a class whose objects have an `inner` one properties for the inner one's members that `base` names."""
    for name in vars(base):
        if not name.startswith("_") and name not in vars(kind):
            setattr(kind, name, property(attrgetter(f"inner.{name}")))


forward_members(ForwardingStrategy, Strategy)


class ElasticStrategy(ForwardingStrategy):
    """Trains with another strategy, survives faults, and takes the same optimizer steps as an undisturbed run.

    An agent (torch.distributed.elastic) watches the workers and restarts them when one dies or hangs, or when nodes
    join or leave. They resume from a snapshot in memory, or else from the newest checkpoint. The global batch size
    stays that of the first round. Under torchrun, SLURM or MPI, whose agents do not support this, it behaves like its
    inner strategy; start the program directly, or use ``echelon launch``.

    Args:
        inner: ``"ddp"``, ``"zero"``, ``"fsdp"``, ``"hsdp"``, ``"tp"``, ``"pp"``, or an instance of such a strategy.
            With a `ParallelStrategy`, dp_shard follows the number of nodes; if the other degrees do not divide the
            number of ranks, the run stops.
        nodes: number of machines, or "MIN:MAX".
        rdzv: "HOST:PORT" at which several nodes meet: the address of one of them, or of ``echelon rendezvous``.
        run_id: distinguishes this run from others that use the same rendezvous.
        max_restarts: number of failures and hangs that a run survives; nodes that join or leave do not count.
        snapshot_every: optimizer steps between two snapshots; by default, chosen to keep their cost below 1% of the
            training time; 0 for none.
        hang_timeout: how long a step may take; by default 20 times the longest recent step, and at least 5 s.
        grace: how long workers may take to finish their step when this node is told to leave.
        last_call: how long to wait for more nodes once the minimum number has joined.
        chaos: faults to inject into the run, see `Chaos`.

    Example::

        Trainer(strategy=ElasticStrategy("fsdp", max_restarts=3), devices=2)
        Trainer(strategy=ElasticStrategy("ddp", nodes="1:4", rdzv="10.0.0.1:29400"), devices=8, accelerator="cpu")
    """

    name: ClassVar[str] = "elastic"
    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True
    supports_restarts: bool = False
    needs_trainer: ClassVar[bool] = True
    can_try_steps: bool = False
    launcher: ElasticLauncher

    def __init__(
        self,
        inner: str | Strategy = "ddp",
        *,
        nodes: int | str = 1,
        rdzv: str | None = None,
        run_id: str = "echelon",
        max_restarts: int = 10,
        snapshot_every: int | None = None,
        hang_timeout: timedelta | None = None,
        grace: timedelta = timedelta(seconds=30),
        last_call: timedelta = timedelta(seconds=3),
        chaos: str | Chaos | None = None,
    ) -> None:
        super().__init__(_make_inner_strategy(inner))
        self.nodes = parse_nodes(nodes)
        RestartPolicy(max_restarts)  # raises if it is invalid
        if snapshot_every is not None and snapshot_every < 0:
            raise ConfigError(f"snapshot_every must be >= 0 (0 for no snapshots), got {snapshot_every}.")
        of_workers = ElasticSettings(snapshot_every, chaos if isinstance(chaos, Chaos) else Chaos(chaos or ""))
        self._options = ElasticOptions(
            nodes=self.nodes,
            rdzv=rdzv,
            run_id=run_id,
            max_restarts=max_restarts,
            limits=Limits(None if hang_timeout is None else hang_timeout.total_seconds()),
            grace=grace,
            last_call=last_call,
            of_workers=of_workers,
        )
        self.launcher = ElasticLauncher(self.ranks.environment, self._options)
        if self.nodes != (1, 1) and rdzv is None:
            raise ConfigError(
                f"rdzv must be 'HOST:PORT' for nodes={nodes!r}, got None; give the address of one of the nodes, or of "
                "`echelon rendezvous`."
            )

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        environment, (least, _) = hardware.environment, self.nodes
        if not environment.is_external:
            number = least * environment.local_world_size
            hardware = replace(hardware, environment=replace(environment, num_nodes=least, world_size=number))
        self.inner.validate(hardware, precision)
        static = self.inner.launcher
        self.launcher = ElasticLauncher(
            hardware.environment, self._options, uses_devices=static.uses_devices, start_timeout=static.start_timeout
        )

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        """Take the device, and join the process group of this round and the agent's node folder."""
        supervisor = self.launcher.find_supervisor(detect_environment().local_rank)
        self.inner.connect(hardware, precision)
        if supervisor is not None:
            supervisor.join(self.ranks.group)


def parse_nodes(nodes: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes, given "MIN:MAX" or one number.

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", str(nodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"nodes must be >= 1 or 'MIN:MAX' such as '1:4', got {nodes!r}.")
    return least, most


def _make_inner_strategy(inner: str | Strategy) -> Strategy:
    strategy = find_strategy(inner, argument="inner")()
    if not strategy.supports_restarts:
        names = ", ".join(name for name, make in STRATEGIES.items() if make().supports_restarts)
        raise ConfigError(
            f"inner must be a strategy whose workers can be started again, got {strategy.name!r}; use one of {names}."
        )
    return strategy
