"""ElasticLauncher: the processes of a run, restarted after faults and when nodes join or leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cluster.environment import Environment
from ..launch.run_launcher import RunLauncher
from .hang_detection import Limits
from .restart_policy import RestartPolicy
from .supervisor import ElasticSettings, Supervisor

if TYPE_CHECKING:
    from ..launch.launcher import MakeAgent
    from .elastic_agent import ElasticAgent


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The settings of `ElasticStrategy` that agents follow; it describes them."""

    nodes: tuple[int, int]
    """The minimum and the maximum number of machines."""
    rdzv: str | None
    run_id: str
    max_restarts: int
    limits: Limits
    grace: timedelta
    last_call: timedelta
    of_workers: ElasticSettings = field(default_factory=ElasticSettings)
    """The settings that workers follow."""


class ElasticLauncher(RunLauncher):
    """Starts the processes under an agent that restarts them, unless a launcher has, whose agent does not.

    Args:
        environment: the processes of the run, of as many nodes as it needs at least.
        options: what the agents follow.
        settings: those of `RunLauncher`.
    """

    supervisor: Supervisor | None = None

    def __init__(self, environment: Environment, options: ElasticOptions, **settings: Any) -> None:
        super().__init__(environment, **settings)
        self.options = options

    @property
    def starts_processes(self) -> bool:
        return not self.environment.is_external

    @property
    def is_local(self) -> bool:
        return self.options.nodes == (1, 1)

    def find_supervisor(self, local_rank: int) -> Supervisor | None:
        """Find the agent of this worker; None if another launcher has started it."""
        self.supervisor = Supervisor.find(local_rank, self.options.of_workers)
        return self.supervisor

    @contextmanager
    def _agents(self) -> Iterator[MakeAgent]:
        from ..launch.node_folder import NodeFolder

        with NodeFolder.create() as folder:
            yield partial(self._make_agent, folder=folder.path)

    def _make_agent(self, job: Any, *, folder: Any) -> ElasticAgent:
        from .elastic_agent import ElasticAgent
        from .elastic_rendezvous import make_rendezvous

        options = self.options
        meet = partial(
            make_rendezvous,
            nodes=options.nodes,
            endpoint=options.rdzv,
            run_id=options.run_id,
            start_timeout=self.start_timeout,
            last_call=options.last_call,
        )
        return ElasticAgent(
            job,
            self.environment.local_world_size,
            meet,
            folder,
            RestartPolicy(options.max_restarts),
            limits=options.limits,
            grace=options.grace.total_seconds(),
        )
