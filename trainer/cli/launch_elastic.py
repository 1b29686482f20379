"""Elastic launch: the agent restarts the program after faults, and when nodes join or leave."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ...strategies.launch.agent import Agent
    from ...strategies.launch.failures import WorkerExit
    from ...strategies.launch.worker import WorkerTask

START_TIMEOUT: Final = timedelta(minutes=10)  # torchrun's


@dataclass(frozen=True)
class Program:
    """The program that a worker runs as ``__main__``."""

    name: str
    """The name of a file or a module."""
    arguments: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """Run it as a separate interpreter would; return after an exit with code 0.

        Raises:
            SystemExit: with any other code.
            BaseException: what the program raised.
        """
        sys.argv = [self.name, *self.arguments]
        try:
            if self.is_module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)))
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def run_elastic(
    program: Program,
    *,
    num_processes: int,
    nodes: tuple[int, int],
    endpoint: str | None,
    run_id: str,
    max_restarts: int,
    grace: float,
    hang_timeout: float | None,
) -> int:
    """Run the program in `num_processes` processes of this node; return the exit code of the launch.

    The arguments are those of `ElasticStrategy`; times are in seconds.
    """
    from ...strategies.launch.launcher import launch_workers
    from ...strategies.launch.node_folder import NodeFolder
    from ...strategies.resilience.elastic_agent import ElasticAgent
    from ...strategies.resilience.elastic_rendezvous import make_rendezvous
    from ...strategies.resilience.hang_detection import Limits
    from ...strategies.resilience.restart_policy import RestartPolicy

    agents: list[Agent] = []

    def make_agent(job: WorkerTask) -> Agent:
        meet = partial(make_rendezvous, nodes=nodes, endpoint=endpoint, run_id=run_id, start_timeout=START_TIMEOUT)
        policy = RestartPolicy(max_restarts, first_step_limit=None)
        limits = Limits(hang_timeout, has_beats=False)
        agents.append(ElasticAgent(job, num_processes, meet, folder.path, policy, limits=limits, grace=grace))
        return agents[0]

    _show_log()
    with NodeFolder.create() as folder:
        return _code_of(lambda: launch_workers(program.run, make_agent, is_local=nodes == (1, 1)), agents)


def _code_of(job: Callable[[], None], agents: list[Agent]) -> int:
    try:
        job()
    except KeyboardInterrupt:
        return _report_end("ended by SIGINT", 130)
    except SystemExit:
        return _report_end("ended by a signal after saving a checkpoint; start it again to resume", 143)
    except BaseException as error:
        from ...strategies.resilience.elastic_rendezvous import SpareError

        if isinstance(error, SpareError):
            return _report_end(str(error), 0)
        ends = agents[0].failed if agents else []
        if not ends:
            raise
        cause = min(ends, key=lambda end: end.likelihood)
        return _report_end(_describe_end(cause, agents[0].report), code_of_end(cause))
    return 0


def _describe_end(cause: WorkerExit, report: str | None) -> str:
    shown = cause.failure.traceback if cause.failure is not None and not cause.failure.is_exit else ""
    return "\n".join(filter(None, [shown and f"\n{shown}", cause.describe(), report]))


def code_of_end(cause: WorkerExit) -> int:
    """Return the exit code that a shell would report for the end of a worker."""
    if cause.failure is None:
        return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code
    code = cause.failure.exit_code
    return 1 if code is None or code < 0 else code


def _report_end(message: str, code: int) -> int:
    print(f"echelon: {message}", file=sys.stderr)
    return code


def _show_log() -> None:
    """Print the log of the agent to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("echelon: %(message)s"))
    log = logging.getLogger("echelon")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
