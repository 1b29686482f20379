"""PlacedOnServers: replicas of a module whose parameters and optimizer state are held, and updated, by servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...common.errors import ConfigError, RunError
from ..module.memory_estimate import MemoryShare
from ..parallel.ddp_options import DDPOptions
from ..parallel.optimizer_probe import (
    OptimizerProbe,
    attribute_with_parameters,
    check_can_be_dealt,
    is_known_optimizer,
)
from ..parallel.replica import Replica, copy_from_first
from ..parallel.sharding_policy import sparse_layers
from ..servers.choices import ServerChoices
from ..servers.connection import Connection, Timeouts
from ..servers.flat_layout import deal_names
from ..servers.served_optimizer import ServedOptimizer
from ..servers.served_state import ServedState, mean_gradients, multiply_gradients, sparse_gradient
from ..servers.tables import RemoteTables
from ..state.dtensor import multiply_all
from ..state.optimizer_state import Sharded, needs_closure
from ..state.sendable import check_lookups
from ..state.shared_memory import check_unshared
from .placed import ClipAlgorithm, Site
from .replica import PlacedReplica


class PlacedOnServers(PlacedReplica):
    """A replica whose parameters are held by servers beside the trainers, of which this process is one.

    Args:
        site: where it lies.
        module: the module.
        choices: the user's, of servers.
        options: how gradients are synchronized, of what the servers do not hold.
        timeouts: how long to wait for servers and trainers.
        outlives_run: whether this process goes on after the run, and its optimizers get their state back.
        is_manual: whether the step itself computes gradients and updates.
    """

    def __init__(
        self,
        site: Site,
        module: nn.Module,
        *,
        choices: ServerChoices,
        options: DDPOptions,
        timeouts: Timeouts,
        outlives_run: bool,
        is_manual: bool,
    ) -> None:
        self._tables = tables = None if choices.serves_all else RemoteTables(module)
        if tables is None:
            copy_from_first([*module.parameters(), *module.buffers()], site.ranks.all)
            replica = Replica(module, None, options, is_manual=is_manual)
        else:
            collectives = None if site.ranks.group is None else site.ranks.all
            replica = Replica(module, collectives, options, is_manual=is_manual, ignored=tables.all_names)
        # nothing to compare: the servers hold the parameters, and trainers have copies of some age
        super().__init__(site, module, replica, None)
        self._choices, self._options, self._timeouts = choices, options, timeouts
        self._outlives_run = outlives_run
        self.connection: Connection | None = None
        """Between `take_optimizers` and `close`."""
        self.served: dict[Optimizer, ServedOptimizer] = {}
        """What stands for each optimizer on the servers."""
        self._has_failed = False

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(optimizer=lambda _: 0.0) if self._tables is None else self._tables.memory_share

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self.served = {}
        if self.ranks.group is not None:
            check_lookups(self.module, self.site.name)  # with what configure_model has built
        holders = self._deal(optimizers)
        choices = self._choices
        connection = self.connection = Connection(
            self.ranks.environment,
            self.ranks.all,
            None if self.ranks.group is None else self.ranks.group.store,
            num_servers=None if choices.servers == "nodes" else choices.servers,
            max_staleness=choices.bound,
            timeouts=self._timeouts,
        )
        if self._tables is not None:
            self._tables.leave(connection, holders)
        for key, optimizer in enumerate(optimizers):
            names = {n for n, p in self._names(optimizer).items() if self._tables is None or n in self._tables.names}
            if names or self._tables is None:
                self.served[optimizer] = ServedOptimizer(
                    optimizer,
                    key,
                    self.module,
                    connection,
                    self.ranks.all,
                    holders=holders,
                    tables={} if self._tables is None else self._tables.sparse,
                    is_async=choices.bound is not None,
                    may_draw=not is_known_optimizer(optimizer),
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
            if self._num_servers > 1 or self._tables is not None:
                check_can_be_dealt(OptimizerProbe(optimizer), self.site.name, self.ranks.all)
        owners = [name for optimizer in optimizers for name in self._names(optimizer)]
        twice = sorted({name for name in owners if owners.count(name) > 1})
        if twice:
            raise ConfigError(
                f"strategy='ps' needs one optimizer for each parameter, got two for {twice[0]}; give it one."
            )
        sizes = check_served(self.module, self._tables, self._choices, self._num_servers)
        return {name: index for index, names in enumerate(deal_names(sizes, self._num_servers)) for name in names}

    @property
    def _num_servers(self) -> int:
        return self._choices.number_on(self.ranks.environment.num_nodes)

    def annotate(self, error: BaseException) -> None:
        self._has_failed = True

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            try:
                if self._tables is not None:
                    self._tables.come_home(connection, has_failed=self._has_failed)
                if self._outlives_run:
                    for served in self.served.values():
                        served.come_home(has_failed=self._has_failed)
            finally:
                self.served = {}
                connection.close(has_failed=self._has_failed)
        super().close()

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        if self._tables is not None or self.precision.uses_scaler:
            super().stand_by(step_name, busy, run)
        else:  # no parameter gets a gradient
            self.backward(torch.zeros((), device=self.device, requires_grad=True))

    def scale_gradients(self, factor: Tensor | float) -> None:
        multiply_gradients(self.module.parameters(), factor)

    def unscale(self, optimizer: Optimizer) -> None:
        if self.precision.uses_scaler and not self.scaling.has_unscaled(optimizer):
            super().unscale(optimizer)
            self.scaling.share_overflows(optimizer, self.ranks.all)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> None:
        served = self.served.get(optimizer)
        if served is None or self._choices.bound is not None:  # an update uses the gradients of one trainer
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
        for served in self.served.values():
            served.end_step()
        return super().end_step()

    def step_metrics(self) -> Mapping[str, float]:
        """Return, in async mode, the staleness of pushes so far (the mean and the largest lead) and the time waited."""
        if self._choices.bound is None or self.connection is None:
            return {}
        staleness = [served.staleness for served in self.served.values() if served.staleness]
        number = sum(each[0] for each in staleness) or 1
        return {
            "staleness_mean": sum(each[1] for each in staleness) / number,
            "staleness_max": max((each[2] for each in staleness), default=0.0),
            "wait": self.connection.waited,
        }

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> None:
        """Set replicas' buffers to rank 0's, and in async mode their parameters to the servers'. Collective."""
        super().sync_replicas(only_compares=only_compares)
        if self._tables is None and not only_compares:
            if self._options.broadcast_buffers:
                copy_from_first(self.module.buffers(), self.ranks.all)
            if self._choices.bound is not None and self.served:
                self.ranks.all.barrier()  # now all trainers have pushed
                for served in self.served.values():
                    served.pull()

    def model_state(self) -> dict[str, object]:
        state = super().model_state()
        if self._tables is None or self.connection is None:
            return state
        return Sharded(self._tables.own_share(state, self.connection, self.ranks.all))

    def full_model_state(self) -> dict[str, object]:
        state = dict(super(PlacedReplica, self).model_state())
        if self._tables is not None and self.connection is not None and self._is_first_of_node():
            state.update(self._tables.fetch_all(self.connection))
        return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in state.items()}

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        served = {n: p for n, p in named.items() if self._tables is None or n in self._tables.names}
        rest = super().whole_tensors({n: p for n, p in named.items() if n not in served}, gradients=gradients)
        if gradients:
            return rest | mean_gradients(served, self.ranks.all)
        if self._tables is None or self.connection is None:
            return rest | super().whole_tensors(served)
        return rest | self._tables.fetch(self.connection, list(served))

    def load_model_state(self, state: Mapping[str, object], *, strict: bool = True) -> None:
        if self._tables is None or self.connection is None:
            super().load_model_state(state, strict=strict)
            for served in self.served.values():
                served.take_weights()
            return
        self._tables.load(state, self.connection, self.ranks.all)
        super().load_model_state(self._tables.without_memory(state), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the groups and this trainer's share of the state, by name; each trainer saves a different share."""
        state = super().optimizer_state(optimizer)
        served = self.served.get(optimizer)
        # after a fit that has failed, the servers may have answered some of the trainers only
        if served is None and self.ranks.all.all_reduce(float(isinstance(optimizer.state, ServedState)), "max"):
            raise RunError(
                "The state of the optimizers cannot be saved, got none: it was lost with a server when the fit "
                "failed. Save with weights_only=True, or resume with fit(..., ckpt_path='last')."
            )
        if served is None or not served.is_assigned:
            return state
        local = state["state"] if self.ranks.rank == 0 else {}
        return {**state, "state": Sharded({**local, **served.own_state()})}


def check_served(
    module: nn.Module, tables: RemoteTables | None, choices: ServerChoices, num_servers: int
) -> dict[str, int]:
    """Return the bytes of each parameter that is served, by name: any of them may be given to an optimizer later.

    Raises:
        ConfigError: if there are too few for the servers.
        ModuleError: for one that cannot be served.
    """
    check_unshared(module, "ps", with_buffers=False)
    named = {n: p for n, p in module.named_parameters() if tables is None or n in tables.names}
    choices.check_number(num_servers, len(named))
    for name, _ in sparse_layers(module) if tables is None else ():
        raise sparse_gradient(f"{name}.weight" if name else "weight")
    return {name: 0 if is_lazy(p) else p.numel() * p.element_size() for name, p in named.items()}
