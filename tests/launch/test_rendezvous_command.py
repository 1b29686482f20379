"""`echelon rendezvous` keeps a store for successive runs, on one address, until it is told to end."""

import contextlib
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from ports import free_port

from echelon.common.errors import ProcessError
from echelon.strategies.resilience.elastic_rendezvous import make_rendezvous
from echelon.trainer.cli.main import main

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from echelon.trainer.cli.main import main; sys.exit(main())",
    "rendezvous",
]
LIMIT = timedelta(seconds=120)


@contextlib.contextmanager
def rendezvous(endpoint):
    with subprocess.Popen([*COMMAND, "--listen", endpoint], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"echelon: nodes meet at {endpoint}\n"
            yield process
        finally:
            process.kill()


def meet(endpoint, run_id):
    where = make_rendezvous(
        nodes=(1, 2), endpoint=endpoint, run_id=run_id, start_timeout=LIMIT, last_call=timedelta(seconds=0.2)
    )
    where.next_rendezvous()
    return where


@pytest.mark.only_in_sweep
def test_it_keeps_runs_apart_knows_which_are_over_and_ends_when_it_is_told_to():
    endpoint = f"127.0.0.1:{free_port()}"
    with rendezvous(endpoint) as process:
        first, second = meet(endpoint, "first"), meet(endpoint, "second")
        assert (first.num_nodes, second.num_nodes) == (1, 1)
        assert first.shutdown()
        with pytest.raises(ProcessError, match=f"The run 'first' at {endpoint} is over; give .* another run"):
            meet(endpoint, "first")
        process.send_signal(signal.SIGTERM)
        assert process.wait(80) == 0
        with pytest.raises(ProcessError, match=f"The store at {endpoint} no longer answers .*echelon rendezvous"):
            second.num_nodes_waiting()
        first.release()
        second.release()


def test_addresses_that_cannot_be(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["rendezvous", "--listen", endpoint]) == 1
    assert f"cannot listen on {endpoint} (Address already in use); give an address of this" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["rendezvous", "--listen", "10.0.0.1:port"])
    assert "--listen 10.0.0.1:port must be an address" in capsys.readouterr().err
