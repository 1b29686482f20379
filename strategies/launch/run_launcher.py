"""RunLauncher: how the processes of a run come to be, and what watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..cluster.environment import Environment
from ..distributed.process_group import START_TIMEOUT

if TYPE_CHECKING:
    from .launcher import MakeAgent

T = TypeVar("T")


class RunLauncher:
    """Starts the processes of a run on this node, unless a program such as torchrun has.

    Args:
        environment: the processes of the run.
        uses_devices: whether they use CUDA devices.
        start_timeout: how long they wait for each other at the start.
    """

    supervisor: Any = None
    """In a worker that is restarted after faults, its connection to the agent that does so; None in all others."""

    def __init__(
        self, environment: Environment, *, uses_devices: bool = False, start_timeout: timedelta = START_TIMEOUT
    ) -> None:
        self.environment, self.uses_devices, self.start_timeout = environment, uses_devices, start_timeout

    @property
    def starts_processes(self) -> bool:
        """Whether `launch` starts the processes: there are several, and no launcher has."""
        return self.environment.world_size > 1 and not self.environment.is_external

    @property
    def is_local(self) -> bool:
        """Whether all processes of the run are on this machine."""
        return self.environment.num_nodes == 1

    def launch(
        self,
        function: Callable[[], T],
        *,
        on_result: Callable[[T], None] | None = None,
        parts: Mapping[str, object] | None = None,
    ) -> T:
        """Start the processes, run `function` in each, and return its result from the first process of this node.

        Args:
            function: the function to run; it is pickled and sent to the processes.
            on_result: called with the result before any signal that this process received meanwhile is raised.
            parts: the objects that are pickled with `function`, by the names that an error uses for them.
        """
        from .launcher import launch_workers

        with self._agents() as make_agent:
            return launch_workers(
                function,
                make_agent,
                is_local=self.is_local,
                uses_devices=self.uses_devices,
                on_result=on_result,
                parts=parts,
            )

    @contextmanager
    def _agents(self) -> Iterator[MakeAgent]:
        """Yield what makes the agent that starts and watches the processes of this node."""
        from .launcher import static_agents

        yield static_agents(self.environment.local_world_size, self.environment, self.start_timeout)
