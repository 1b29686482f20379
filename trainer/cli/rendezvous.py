"""The command ``echelon rendezvous``: the store of elastic runs, on a machine that outlives their nodes."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType
from typing import Final

from ...common.errors import RunError
from ...strategies.cluster.environment import DEFAULT_PORT

_EPILOG: Final = f"""\
on a machine that outlives the nodes, such as a head node whose address is 10.0.0.1:
  echelon rendezvous --listen 10.0.0.1:{DEFAULT_PORT}
on each node:
  echelon launch --nproc 4 --nodes 1:4 --rdzv 10.0.0.1:{DEFAULT_PORT} --run-id first train.py

Without it, the node whose address --rdzv gives hosts the store, in a separate process, and a run does not survive the
loss of that machine. One store serves any number of runs, each with its own --run-id; it keeps what their nodes need to
meet, and nothing of their training.

Anyone who can connect to the port can run code on every node: make it reachable only from the nodes. The store listens
on the given address; given a name, it would listen on all addresses of this machine.

exit codes:
  0 ended by Ctrl-C or SIGTERM   1 the address is in use, or not of this machine   2 wrong command
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address to listen on."""
    parser.epilog = _EPILOG
    parser.add_argument("--listen", metavar="HOST[:PORT]", required=True, help="an address of this machine")


def run(options: argparse.Namespace) -> int:
    """Keep the store until a signal ends it; return 0."""
    endpoint = options.listen
    try:
        _serve_store(endpoint)
    except ValueError as error:
        message = f"--listen {endpoint} must be an address ({error}); give HOST:PORT"
        raise argparse.ArgumentError(None, message) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RunError(
            f"cannot listen on {endpoint} ({reason}); give an address of this machine, and a free port"
        ) from error
    except KeyboardInterrupt:
        pass
    return 0


def _serve_store(endpoint: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from ...strategies.cluster.tcp_store import listen_on_address
    from ...strategies.resilience.store_process import serve

    host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    listener = listen_on_address(host, port)
    address, port = listener.getsockname()[:2]
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a batch script ignores it, as its nodes get the signal
            signal.signal(number, _end_serving)
    print(f"echelon: nodes meet at {host}:{port}", flush=True)
    serve(address, port, listener.detach(), is_kept=True)


def _end_serving(received: int, frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the shutdown
    raise KeyboardInterrupt
