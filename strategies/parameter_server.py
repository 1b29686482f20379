"""ParameterServerStrategy: trainers compute gradients; servers beside them hold the parameters and update them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar, Final, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, RunError
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .module.memory_estimate import MemoryShare
from .module.precision import Precision
from .parallel.equal_ranks import overrides
from .parallel.optimizer_probe import OptimizerProbe, attribute_with_parameters, check_can_be_dealt
from .parallel.replica import DDPOptions, Replica, copy_from_first
from .parallel.sharding_policy import sparse_layers
from .servers.choices import ServerChoices
from .servers.connection import Connection, Timeouts
from .servers.flat_layout import deal
from .servers.processes import prepare_nursery
from .servers.remote_calls import RemoteCalls
from .servers.served_optimizer import ServedOptimizer
from .servers.served_state import ServedState, mean_gradients, multiply_gradients, sparse_gradient
from .servers.tables import RemoteTables
from .state.dtensor import multiply_all
from .state.optimizer_state import Sharded, needs_closure
from .state.shared_memory import check_unshared
from .strategy import ClipAlgorithm
from .torch_internals import overflows_of

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

    _connection: Connection | None = None
    """Between `setup_optimizers` and `close`."""

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
        self._tables: RemoteTables | None = None
        self._served: dict[Optimizer, ServedOptimizer] = {}
        self._has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_connection": None, "_served": {}, "_tables": None}

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.choices.validate(self.environment, uses_scaler=precision.uses_scaler)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        if not trains:  # without servers
            return
        if not getattr(module, "automatic_optimization", True):
            raise ConfigError(
                "strategy='ps' needs automatic optimization, because its servers update the parameters, got a module "
                "with automatic_optimization=False; use strategy='ddp', or let the trainer step the optimizers."
            )
        if not overrides(module, "configure_model"):
            self._check_parameters(module, None if self.choices.serves_all else RemoteTables(module))

    def _check_parameters(self, module: nn.Module, tables: RemoteTables | None) -> dict[str, int]:
        """Return the bytes of each parameter that is served, by name: any of them may be given to an optimizer later.

        Raises:
            ConfigError: if there are too few for the servers.
            ModuleError: for one that cannot be served.
        """
        check_unshared(module, self.name, with_buffers=False)
        named = {n: p for n, p in module.named_parameters() if tables is None or n in tables.names}
        self.choices.check_number(self.num_servers, len(named))
        for name, _ in sparse_layers(module) if tables is None else ():
            raise sparse_gradient(f"{name}.weight" if name else "weight")
        return {name: parameter.numel() * parameter.element_size() for name, parameter in named.items()}

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        if detect_environment().local_rank == 0:
            prepare_nursery()
        super().connect(hardware, precision)

    @property
    def max_lead(self) -> int:
        return self.choices.bound or 0

    @property
    def memory_share(self) -> MemoryShare:
        if self.choices.serves_all:
            return MemoryShare(optimizer=lambda _: 0.0)
        return MemoryShare() if self._tables is None else self._tables.memory_share

    @property
    def num_servers(self) -> int:
        """The number of servers, on all nodes."""
        return self.environment.num_nodes if self.choices.servers == "nodes" else self.choices.servers

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        self._has_failed = False
        self._tables = None if self.choices.serves_all else RemoteTables(module)
        super().setup_module(module, is_manual=is_manual)

    def _make_replica(self, module: nn.Module, *, is_manual: bool) -> Replica:
        if self._tables is not None:
            collectives = None if self.ranks.group is None else self.ranks.all
            return Replica(module, collectives, self.options, is_manual=is_manual, ignored=self._tables.all_names)
        copy_from_first(chain(module.parameters(), module.buffers()), self.ranks.all)
        return Replica(module, None, self.options, is_manual=is_manual)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._served = {}
        holders = self._deal(optimizers)
        choices, settings = self.choices, self._process_settings
        connection = self._connection = Connection(
            self.environment,
            self.ranks.all,
            None if self.ranks.group is None else self.ranks.group.store,
            num_servers=None if choices.servers == "nodes" else choices.servers,
            max_staleness=choices.bound,
            timeouts=Timeouts(
                self.launcher.start_timeout, choices.answer_timeout, settings.get("timeout", _PUSH_TIMEOUT)
            ),
        )
        if self._tables is not None:
            self._tables.leave(connection, holders)
        for key, optimizer in enumerate(optimizers):
            names = {n for n, p in self._names(optimizer).items() if self._tables is None or n in self._tables.names}
            if names or self._tables is None:
                self._served[optimizer] = ServedOptimizer(
                    optimizer,
                    key,
                    self.module,
                    connection,
                    self.ranks.all,
                    holders=holders,
                    tables={} if self._tables is None else self._tables.sparse,
                    is_async=choices.bound is not None,
                )

    def _names(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: parameter for name, parameter in self.module.named_parameters() if id(parameter) in own}

    def _deal(self, optimizers: Sequence[Optimizer]) -> dict[str, int]:
        """Return the server of each parameter that is served.

        Raises:
            ConfigError: for optimizers and modules that cannot be served.
        """
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ConfigError(
                    f"strategy='ps' does not work with {type(optimizer).__name__}, which evaluates the loss itself; "
                    "use strategy='ddp', or an optimizer that updates each parameter by itself."
                )
            holding = attribute_with_parameters(optimizer)
            if holding is not None:
                raise ConfigError(
                    f"strategy='ps' has servers step a copy of the optimizer, but {type(optimizer).__name__}.{holding} "
                    "holds parameters or another optimizer, which there would be others; let it use param_groups, or "
                    "use strategy='ddp'."
                )
            if self.num_servers > 1 or self._tables is not None:
                check_can_be_dealt(OptimizerProbe(optimizer), self.name, self.ranks.all)
        owners = [name for optimizer in optimizers for name in self._names(optimizer)]
        twice = sorted({name for name in owners if owners.count(name) > 1})
        if twice:
            raise ConfigError(
                f"strategy='ps' needs one optimizer for each parameter, got two for {twice[0]}; give it one."
            )
        sizes = self._check_parameters(self.module, self._tables)
        return {name: index for index, names in enumerate(deal(sizes, self.num_servers)) for name in names}

    def annotate(self, error: BaseException) -> None:
        self._has_failed = True

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                if self._tables is not None:
                    self._tables.come_home(connection, has_failed=self._has_failed)
                if not self.launcher.starts_processes:  # else they end with this run
                    for served in self._served.values():
                        served.come_home(has_failed=self._has_failed)
            finally:
                self._served = {}
                connection.close(has_failed=self._has_failed)
        super().close()

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        if self._tables is not None or self.precision.uses_scaler:
            super().stand_by(step_name, busy, run)
        else:  # no parameter gets a gradient
            self.backward(torch.zeros((), device=self.device, requires_grad=True))

    def scale_gradients(self, factor: Tensor | float) -> None:
        multiply_gradients(self.module.parameters(), factor)

    def unscale(self, optimizer: Optimizer) -> None:
        is_done = not self.precision.uses_scaler or self._scaling.has_unscaled(optimizer)
        super().unscale(optimizer)
        if not is_done:
            for overflow in overflows_of(self.scaler, optimizer, self.device):
                overflow.copy_(self.ranks.all.all_reduce(overflow, "max"))

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> None:
        served = self._served.get(optimizer)
        if served is None or self.choices.bound is not None:  # an update uses the gradients of one trainer
            super().clip(optimizer, limit, algorithm)
            return
        squared_norm = served.gather()
        own = (
            []
            if self._tables is None
            else [p for n, p in self._names(optimizer).items() if n not in self._tables.names]
        )
        gradients = [parameter.grad for parameter in own if parameter.grad is not None]
        if algorithm == "value":
            served.limit(limit)
            if gradients:
                nn.utils.clip_grad_value_(own, limit)
            return
        squared_norm += sum(float(torch.linalg.vector_norm(gradient).double().square()) for gradient in gradients)
        factor = min(1.0, limit / (squared_norm**0.5 + 1e-6)) if squared_norm == squared_norm else squared_norm
        served.scale(factor)
        multiply_all(gradients, factor)

    def end_step(self) -> bool:
        for served in self._served.values():
            served.end_step()
        return super().end_step()

    def step_metrics(self) -> Mapping[str, float]:
        """Return, in async mode, the staleness of pushes so far (the mean and the largest lead) and the time waited."""
        if self.choices.bound is None or self._connection is None:
            return {}
        staleness = [served.staleness for served in self._served.values() if served.staleness]
        number = sum(each[0] for each in staleness) or 1
        return {
            "staleness_mean": sum(each[1] for each in staleness) / number,
            "staleness_max": max((each[2] for each in staleness), default=0.0),
            "wait": self._connection.waited,
        }

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
        if self._connection is None or self.choices.bound is None or not self._served:
            raise RunError("strategy.ledger() needs a running fit in async mode, found none; call it in a hook.")
        return self._served[optimizer if optimizer is not None else next(iter(self._served))].ledger()

    # --- state -------------------------------------------------------------------------------------------------------

    def _make_check(self, module: nn.Module) -> None:
        """Compare nothing: the servers hold the parameters, and trainers have copies of some age."""

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> None:
        """Set replicas' buffers to rank 0's, and in async mode their parameters to the servers'. Collective."""
        super().sync_replicas(only_compares=only_compares)
        if self._tables is None and not only_compares:
            if self.options.broadcast_buffers:
                copy_from_first(self.module.buffers(), self.ranks.all)
            if self.choices.bound is not None and self._served:
                self.ranks.all.barrier()  # now all trainers have pushed
                for served in self._served.values():
                    served.pull()

    def model_state(self) -> dict[str, Any]:
        state = super().model_state()
        if self._tables is None or self._connection is None:
            return state
        return Sharded(self._tables.own_share(state, self._connection, self.ranks.all))

    def full_model_state(self) -> dict[str, Any]:
        state = dict(super(ReplicaStrategy, self).model_state())
        if self._tables is not None and self._connection is not None and self.local_rank == 0:
            state.update(self._tables.fetch_all(self._connection))
        return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in state.items()}

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        served = {n: p for n, p in named.items() if self._tables is None or n in self._tables.names}
        rest = super().whole_tensors({n: p for n, p in named.items() if n not in served}, gradients=gradients)
        if gradients:
            return rest | mean_gradients(served, self.ranks.all)
        if self._tables is None or self._connection is None:
            return rest | super().whole_tensors(served)
        return rest | self._tables.fetch(self._connection, list(served))

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        if self._tables is None or self._connection is None:
            super().load_model_state(state, strict=strict)
            for served in self._served.values():
                served.take_weights()
            return
        self._tables.load(state, self._connection, self.ranks.all)
        super().load_model_state(self._tables.without_memory(state), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the groups and this trainer's share of the state, by name; each trainer saves a different share."""
        state = super().optimizer_state(optimizer)
        served = self._served.get(optimizer)
        # after a fit that has failed, the servers may have answered some of the trainers only
        if served is None and self.ranks.all.all_reduce(float(isinstance(optimizer.state, ServedState)), "max"):
            raise RunError(
                "The state of the optimizers cannot be saved, got none: it was lost with a server when the fit "
                "failed. Save with weights_only=True, or resume with fit(..., ckpt_path='last')."
            )
        if served is None or not served.is_assigned:
            return state
        local = state["state"] if self.rank == 0 else {}
        return {**state, "state": Sharded({**local, **served.own_state()})}
