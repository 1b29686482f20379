"""The command ``echelon launch``: processes of one program on this node, with torchrun or Echelon's elastic agent."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...common.errors import ConfigError
from ...common.proc_status import children_of, leads_session, look_at
from ...strategies.cluster.environment import (
    DEFAULT_PORT,
    LAUNCH,
    LOOPBACK,
    Environment,
    overriding_variables,
    set_defaults,
)
from ...strategies.cluster.network import address_towards, is_this_machine, loopback_variables
from ...strategies.devices.kinds import available_types
from ...strategies.elastic import parse_nodes
from ...strategies.launch.node_folder import NodeFolder
from .launch_elastic import START_TIMEOUT, Program, run_elastic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_MAX_RESTARTS: Final = 10  # of an elastic run
_GRACE: Final = 30.0  # seconds that torchrun gives processes to end by a signal
_LOOK: Final = 0.05

_EPILOG: Final = f"""\
on one machine, with a store that listens only on loopback:
  echelon launch --nproc 2 train.py --lr 1e-3
  echelon launch --nproc gpu -m my_package.train

on two machines, where node 0 is 10.0.0.1 and its store listens on port {DEFAULT_PORT}:
  echelon launch --nproc 4 --nnodes 2 --node-rank 0 --rdzv 10.0.0.1 train.py      on the first
  echelon launch --nproc 4 --nnodes 2 --node-rank 1 --rdzv 10.0.0.1 train.py      on the second
or, if nodes may get any rank (torchrun's c10d, which listens on every interface), on each:
  echelon launch --nproc 4 --nnodes 2 --rdzv 10.0.0.1:{DEFAULT_PORT} train.py

elastic, with Echelon's own agent: processes restart after faults, and when nodes join or leave; on each machine:
  echelon launch --nproc 4 --nodes 1:4 --rdzv 10.0.0.1:{DEFAULT_PORT} train.py
and on one machine, for faults only:
  echelon launch --nproc 2 --max-restarts 3 train.py

The program's Trainer takes the numbers of devices and nodes from the launch; devices= or num_nodes= that contradict
it raise an error. The processes share the cores equally, unless OMP_NUM_THREADS says how many threads each gets.
torchrun has more options, and a program that it starts runs in the same way.

exit codes:
  0 done   2 wrong command   otherwise that of the process that failed first, or 128 + the signal that ended it
  143 ended by SIGTERM; an elastic launch has saved a checkpoint and left its run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the launch, and then the program with its own arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--nproc",
        type=_parse_nproc,
        required=True,
        metavar="N",
        help="processes on this node: a number, gpu, cpu or auto",
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument(
        "--nnodes", type=_parse_nnodes, default=(1, 1), metavar="N", help="nodes, or MIN:MAX of them (1)"
    )
    nodes.add_argument(
        "--nodes", type=_parse_nnodes, metavar="MIN:MAX", help="the same, but elastic even with a fixed number"
    )
    parser.add_argument(
        "--node-rank", type=_parse_count, metavar="R", help="the rank of this node; --rdzv points to node 0"
    )
    parser.add_argument("--rdzv", metavar="HOST[:PORT]", help="where the nodes meet: an address of node 0")
    parser.add_argument(
        "--max-restarts",
        type=_parse_count,
        metavar="K",
        help="restart all processes up to K times if one fails (0; 10 with --nodes)",
    )
    parser.add_argument("--run-id", default="echelon", metavar="ID", help="distinguishes elastic runs on one store")
    parser.add_argument(
        "--grace",
        type=parse_seconds,
        default=30.0,
        metavar="S",
        help="elastic: seconds to finish a step when told to leave (30)",
    )
    parser.add_argument(
        "--hang-timeout", type=parse_seconds, metavar="S", help="elastic: seconds that a step may take (adapts)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a Python script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the program")


def run(options: argparse.Namespace) -> int:
    """Run the program in the requested processes, and return the job's exit code."""
    is_elastic = options.nodes is not None or options.nnodes[0] < options.nnodes[1] or bool(options.max_restarts)
    options.nnodes = options.nodes or options.nnodes
    _check_options(options)
    if is_elastic:
        return _run_elastic(options)
    # otherwise a worker of a later c10d round may read an earlier round's store address (pytorch#135712, torch 2.14)
    set_defaults({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    if options.nnodes == (1, 1):
        set_defaults(loopback_variables())
    # torchrun does not remove the folder of its error files, so give it one that is removed here
    launch = {LAUNCH: str(os.getpid())}  # so that the processes end with this one, also if it is killed
    with NodeFolder.create(Path(tempfile.gettempdir())) as folder, overriding_variables(launch):
        return _run_torchrun(
            [f"--log-dir={folder.path}", *_torchrun_options(options), options.program], options.arguments
        )


def _parse_nproc(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number from 1, gpu, cpu or auto, got {text!r}")
    return text


def _parse_nnodes(text: str) -> tuple[int, int]:
    try:
        return parse_nodes(text)
    except ConfigError:
        reason = f"must be a number from 1 or MIN:MAX such as 1:4, got {text!r}"
        raise argparse.ArgumentTypeError(reason) from None


def _parse_count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text!r}")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return an argument as seconds.

    Raises:
        argparse.ArgumentTypeError: unless it is a number above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {text!r}")
    return number


def _check_options(options: argparse.Namespace) -> None:
    """Find contradictory options before any process starts."""
    try:
        _check_nodes(options)
        if options.nproc == "gpu" and not available_types():
            raise ValueError("--nproc gpu, but torch finds no GPU here; give a number, or cpu for one process per core")
        if not options.module and not Path(options.program).is_file():
            raise ValueError(f"there is no script {options.program!r} in {Path.cwd()}; for a module, give -m")
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None


def _check_nodes(options: argparse.Namespace) -> None:
    least, most = options.nnodes
    rank, endpoint, restarts = options.node_rank, options.rdzv, options.max_restarts
    if most == 1 and (endpoint is not None or rank is not None):
        given = f"--rdzv {endpoint}" if endpoint is not None else f"--node-rank {rank}"
        raise ValueError(f"{given} is for several nodes; give --nnodes, too")
    if most > 1 and endpoint is None:
        name = "nnodes" if options.nodes is None else "nodes"
        raise ValueError(f"--{name} {most} needs --rdzv HOST[:PORT]: an address of node 0 that all nodes can reach")
    if rank is not None and least != most:
        raise ValueError(f"--node-rank {rank} is for a fixed number of nodes, but --nnodes is {least}:{most}")
    if rank is not None and restarts:
        raise ValueError(
            f"--max-restarts {restarts} on several nodes needs nodes that get their ranks when they join; leave "
            "--node-rank out"
        )
    if rank is not None and options.nodes is not None:
        raise ValueError(f"--node-rank {rank}: elastic nodes get their ranks when they join; leave it out")
    if rank is not None and rank >= most:
        raise ValueError(f"--node-rank {rank} with --nnodes {most}: node ranks go from 0 to {most - 1}")
    if endpoint is not None:
        try:
            address_towards(_host_of_endpoint(endpoint))
        except (OSError, ValueError) as error:
            reason = f"--rdzv {endpoint} cannot be used ({error}); give an address of node 0 that all nodes can reach"
            raise ValueError(reason) from None


def _run_elastic(options: argparse.Namespace) -> int:
    from torch.distributed.run import determine_local_world_size

    from ...strategies.launch.worker import threads_per_process

    num_processes = determine_local_world_size(options.nproc)
    set_defaults({"OMP_NUM_THREADS": str(threads_per_process(num_processes))})
    return run_elastic(
        Program(options.program, tuple(options.arguments), options.module),
        num_processes=num_processes,
        nodes=options.nnodes,
        endpoint=options.rdzv,
        run_id=options.run_id,
        max_restarts=_MAX_RESTARTS if options.max_restarts is None else options.max_restarts,
        grace=options.grace,
        hang_timeout=options.hang_timeout,
    )


def _torchrun_options(options: argparse.Namespace) -> list[str]:
    _, most = options.nnodes
    given = {"nproc-per-node": options.nproc, "nnodes": most}
    given["rdzv-endpoint"] = LOOPBACK if options.rdzv is None else options.rdzv
    if most > 1 and options.node_rank is None:
        given |= {"rdzv-backend": "c10d", **_c10d_address(options.rdzv)}
    else:
        given |= {"rdzv-backend": "echelon", "rdzv-conf": f"node_rank={options.node_rank or 0}"}
    return [*(f"--{name}={value}" for name, value in given.items()), *(["--module"] if options.module else [])]


def _c10d_address(endpoint: str) -> dict[str, str]:
    """Return the address of this node on the network of the rendezvous, and whether this node hosts it.

    torchrun would use this machine's name, which may resolve to loopback.
    """
    host = _host_of_endpoint(endpoint)
    address = address_towards(host)
    if address == LOOPBACK:  # several launches on one machine: the first is the host
        return {"local-addr": address}
    return {"local-addr": address, "rdzv-conf": f"is_host={int(is_this_machine(host))}"}


def _host_of_endpoint(endpoint: str) -> str:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    return parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)[0]


def _static_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of nodes with known ranks; torchrun's would listen on every interface."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from ...strategies.launch.static_rendezvous import Rendezvous

    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    num_nodes, node_rank = parameters.max_nodes, parameters.get_as_int("node_rank") or 0
    return Rendezvous(Environment("none", 0, 0, node_rank, num_nodes, 1, num_nodes, host, port), START_TIMEOUT)


def _run_torchrun(words: list[str], arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import determine_local_world_size, parse_args, run

    from ...strategies.launch.worker import threads_per_process

    rendezvous_handler_registry.register("echelon", _static_rendezvous)
    job = parse_args(words)
    job.training_script_args = arguments  # the parser would take a program's --nproc for an abbreviation
    try:
        # torchrun would give each process one thread, and print a banner about it
        set_defaults({"OMP_NUM_THREADS": str(threads_per_process(determine_local_world_size(job.nproc_per_node)))})
        run(job)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        end = f"exit code {failure.exitcode}" if failure.exitcode > 0 else f"signal {-failure.exitcode}"
        print(f"echelon: rank {rank} (pid {failure.pid}) ended with {end}; see its output", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        _end_children(error.sigval)
        print(f"echelon: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _end_children(number: signal.Signals) -> None:
    """End what torchrun leaves when a signal arrives while it starts the processes: those that it had started."""
    children = [child for child in children_of(os.getpid()) if leads_session(child)]
    _signal_each(children, number)
    limit = time.monotonic() + _GRACE
    while children and time.monotonic() < limit:
        time.sleep(_LOOK)
        children = [child for child in children if look_at(child).state != "ended"]
    if children:
        _signal_each(children, signal.SIGKILL)


def _signal_each(sessions: Iterable[int], number: signal.Signals) -> None:
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, number)
