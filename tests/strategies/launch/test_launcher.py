"""Functions run in new processes: their results, errors, signals and sockets."""

import contextlib
import importlib.util
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from programs import WatchedProgram, run_program
from sweep import only_in_sweep

from echelon import ModelCheckpoint
from echelon.common.errors import ConfigError, ProcessError
from echelon.strategies.cluster.environment import Environment
from echelon.strategies.launch.failures import RankTraceback
from echelon.strategies.launch.fork_server import PRELOADED
from echelon.strategies.launch.launcher import launch_workers, static_agents
from echelon.strategies.launch.signal_handlers import ECHO

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MINUTE = timedelta(minutes=1)


def launched(function, num_processes=2, **options):
    alone = Environment("none", 0, 0, 0, num_processes, num_processes, 1, "127.0.0.1", None)
    return launch_workers(function, static_agents(num_processes, alone, MINUTE), is_local=True, **options)


def rank():
    return int(os.environ["RANK"])


def meet():
    dist.init_process_group("gloo")


def is_there(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition):
    while not condition():  # the test's own time limit ends it
        time.sleep(0.02)


# --- what goes there and comes back ---


def test_the_first_worker_gives_the_result_and_all_are_like_the_caller(monkeypatch):
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER_HAD_STARTED", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)

    def look():
        variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "SET_AFTER_THE_FORK_SERVER_HAD_STARTED")]
        state = torch.get_default_dtype(), torch.get_num_threads(), sys.argv, os.getcwd()
        return variables, state, torch.rand(2), (random.random(), numpy.random.rand())

    torch.set_default_dtype(torch.float64)
    try:
        variables, state, numbers, number = launched(look)
        expected = torch.rand(2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert variables == ["0", "2", "yes"]
    assert state == (torch.float64, 3, ["program", "--flag"], os.getcwd())
    assert torch.equal(numbers, expected)
    assert number == (random.random(), numpy.random.rand())


PROGRAM = """
import torch
from datetime import timedelta
from echelon.strategies.cluster.environment import Environment
from echelon.strategies.launch.launcher import static_agents, launch_workers

class Net(torch.nn.Module):
    scale = 2
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def doubled(self):
        return self.weight * self.scale

class Wrong(Exception):
    def __init__(self, text, number):
        super().__init__(text)
        self.number = number
    def __reduce__(self):
        return Wrong, (*self.args, self.number)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index

def train(net):
    assert list(torch.utils.data.DataLoader(Numbers(), None, num_workers=1)) == [0, 1, 2]
    with torch.no_grad():
        net.weight.mul_(5)
    return net

def fail():
    raise Wrong("no", 3)

def start(function):
    alone = Environment("none", 0, 0, 0, 2, 2, 1, "127.0.0.1", None)
    return launch_workers(function, static_agents(2, alone, timedelta(minutes=1)), is_local=True)

method, net = Net.doubled, Net()
for _ in range(2):
    net = start(lambda net=net: train(net))
assert type(net) is Net and Net.doubled is method, "the class was replaced"
try:
    start(fail)
except Wrong as error:
    print("caught", error.number)
print("began once", net.doubled().tolist())
"""


@pytest.mark.parametrize("file", ["program.py", *only_in_sweep("-")], ids=["in a file", "typed in"])
def test_a_plain_program_needs_no_guard_and_its_own_classes_travel(tmp_path, file):
    (tmp_path / "program.py").write_text(PROGRAM)
    if file == "-":
        words = [sys.executable, file]
        done = subprocess.run(
            words, input=PROGRAM, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
    else:
        done = run_program(file, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["caught 3", "began once [50.0, 50.0, 50.0]"]


def test_each_module_that_the_fork_server_imports_exists():
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []


def test_workers_write_where_the_caller_writes_now(capfd):
    def run():
        print("from a worker")
        print("to errors", file=sys.stderr)

    launched(run)
    assert capfd.readouterr() == ("from a worker\n" * 2, "to errors\n" * 2)


def test_any_thread_may_launch():
    results = []
    thread = threading.Thread(target=lambda: results.append(launched(rank)))
    thread.start()
    thread.join()
    assert results == [0]


def test_what_cannot_travel_is_named():
    class Module:
        def __init__(self):
            self.files = {"log": open(os.devnull, "w")}  # noqa: SIM115

        def train(self):
            pass

    module = Module()
    with pytest.raises(ConfigError, match=r"^module\.files\['log'\] \(TextIOWrapper\) cannot be sent .*setup\(\)"):
        launched(module.train, parts={"module": module})
    module.files["log"].close()


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(ConfigError, match=r"result\[1\] \(generator\) cannot be sent"):
        launched(lambda: [1, (i for i in range(3))], 1)


# --- failures ---


def test_an_exception_keeps_its_type_and_tells_its_rank_and_place(tmp_path):
    def this_one_fails():
        raise ValueError("bad batch")

    def run():
        (tmp_path / str(rank())).write_text(str(os.getpid()))
        if rank() == 1:
            wait_until((tmp_path / "0").exists)
            this_one_fails()
        signal.signal(signal.SIGTERM, lambda *_: None)
        time.sleep(600)

    with pytest.raises(ValueError, match="bad batch") as caught:
        launched(run)
    pids = [int((tmp_path / name).read_text()) for name in "01"]
    assert caught.value.__notes__ == [f"Raised on rank 1 of 2 (process {pids[1]})."]
    calls = traceback.extract_tb(caught.value.__traceback__)
    assert [call.name for call in calls[-2:]] == ["run", "this_one_fails"]
    assert calls[-1].line == 'raise ValueError("bad batch")'
    assert caught.value.__cause__ is None
    assert not any(map(is_there, pids))


def test_what_led_to_an_exception_is_shown_and_echelons_own_frames_are_in_the_log(caplog):
    def run():
        try:
            {}["width"]
        except KeyError as error:
            raise ValueError("no width") from error

    with caplog.at_level(logging.DEBUG, "echelon"), pytest.raises(ValueError, match="no width") as caught:
        launched(run, 1)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "KeyError: 'width'" in str(caught.value.__cause__)
    assert "in run_worker" not in "".join(traceback.format_exception(caught.value))
    assert "in run_worker" in caplog.text
    assert "no width" in caplog.text


def test_an_error_that_echelon_raises_in_a_worker_keeps_all_frames():
    def run():
        ModelCheckpoint(mode="best")

    with pytest.raises(ConfigError, match="got best") as caught:
        launched(run, 1)
    assert {"run_worker", "run", "__init__"} <= {call.name for call in traceback.extract_tb(caught.value.__traceback__)}


def test_the_cause_is_told_and_not_that_its_peers_lost_it():
    def run():
        meet()
        if rank() == 1:
            raise ConfigError("x=1 is not possible; give another.")
        dist.barrier()

    with pytest.raises(ConfigError, match="x=1"):
        launched(run)


def test_a_worker_that_is_killed_is_named():
    def run():
        meet()
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(ProcessError, match=r"Rank 1 of 2 \(process \d+\) was killed by SIGKILL; the other .*dmesg"):
        launched(run)


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (lambda: sys.exit(0), "failed with SystemExit: 0"),
        (lambda: os._exit(0), "ended with exit code 0 before"),
    ],
)
def test_a_worker_that_leaves_early_is_named(leave, text):
    def run():
        if rank() == 1:
            leave()
        time.sleep(600)

    with pytest.raises(ProcessError, match=rf"Rank 1 of 2 \(process \d+\) {text}"):
        launched(run)


def test_an_exception_that_cannot_travel_is_told_in_words():
    class Stubborn(Exception):  # noqa: N818
        def __init__(self, one, two):
            super().__init__(one + two)

    def run():
        raise Stubborn("no ", "way")

    with pytest.raises(ProcessError, match="failed with .*Stubborn: no way"):
        launched(run, 1)


# --- signals ---


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, SystemExit)],
    ids=["SIGTERM", "SIGINT", "SIGUSR1"],
)
def test_a_signal_to_the_caller_ends_workers_in_order_and_then_the_caller(tmp_path, number, raised):
    caller = os.getpid()

    def run():
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
        (tmp_path / str(rank())).touch()
        if rank() == 0:
            wait_until((tmp_path / "1").exists)
            os.kill(caller, number)
        wait_until(lambda: told)
        return told

    results = []
    before = signal.getsignal(number)
    with pytest.raises(raised) as caught:
        launched(run, on_result=results.append)
    assert results == [["SIGTERM"]]
    assert raised is KeyboardInterrupt or caught.value.code == 143
    assert signal.getsignal(number) is before


def test_a_second_signal_kills(tmp_path):
    caller = os.getpid()

    def run():
        def insist(*_):
            time.sleep(1.1 * ECHO)
            os.kill(caller, signal.SIGTERM)

        signal.signal(signal.SIGTERM, insist)
        os.kill(caller, signal.SIGTERM)
        time.sleep(600)

    with pytest.raises(SystemExit):
        launched(run, 1)


def test_a_signal_that_comes_twice_at_once_counts_once(tmp_path):
    """`timeout` sends it to the program, and then to its process group."""
    caller = os.getpid()

    def run():
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
        os.kill(caller, signal.SIGTERM)
        wait_until(lambda: told)
        os.kill(caller, signal.SIGTERM)
        time.sleep(0.3)
        return told

    results = []
    with pytest.raises(SystemExit):
        launched(run, 1, on_result=results.append)
    assert results == [["SIGTERM"]]


def test_a_signal_that_comes_before_there_is_an_agent_is_not_lost(tmp_path):
    def make_agent(job):
        os.kill(os.getpid(), signal.SIGTERM)
        return static_agents(1, Environment("none", 0, 0, 0, 1, 1, 1, "127.0.0.1", None), MINUTE)(job)

    with pytest.raises(SystemExit):
        launch_workers((tmp_path / "has_run").touch, make_agent, is_local=True)
    assert not (tmp_path / "has_run").exists()


@linux_only
def test_a_worker_that_is_gone_is_not_waited_for_when_the_fork_server_tells_nothing(tmp_path):
    fork_server = tmp_path / "fork_server"

    def run():
        fork_server.write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with pytest.raises(ProcessError, match="Rank 0 of 1"):
            launched(run, 1)
    finally:
        os.kill(int(fork_server.read_text()), signal.SIGCONT)


ENDLESS = """
import os, time
from pathlib import Path
from echelon.testing import run_ranks

def run():
    Path(os.environ["RANK"]).write_text(str(os.getpid()))
    Path(os.environ["RANK"]).rename("pid" + os.environ["RANK"])
    time.sleep(600)

run_ranks(run, 2, timeout=600)
"""


@linux_only
def test_workers_die_with_a_caller_that_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(ENDLESS)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    program = WatchedProgram(["program.py"], folder=tmp_path)
    try:
        wait_until(lambda: all(file.exists() for file in files) or program.poll() is not None)
    finally:
        program.close()
    pids = [int(file.read_text()) for file in files]
    wait_until(lambda: not any(map(is_there, pids)))


# --- sockets ---


def listening_addresses(pid):
    """Return the local addresses, as the kernel writes them, of the sockets on which a process listens."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.add(fields[1].split(":")[0])
    return found


@linux_only
def test_a_run_on_one_machine_listens_on_loopback_only():
    def run(caller):
        meet()
        dist.all_reduce(torch.ones(2))
        found = [None, None]
        dist.all_gather_object(found, listening_addresses(os.getpid()))
        return *found, listening_addresses(caller)

    caller = os.getpid()
    before = listening_addresses(caller)
    *workers, launcher = launched(lambda: run(caller))
    assert all(workers), "a rank of gloo listens"
    assert launcher - before, "the caller has the store"
    assert set().union(*workers, launcher - before) <= {"0100007F", "0" * 24 + "01000000"}
    assert listening_addresses(caller) == before


# --- several nodes: two of them in tests/launch ---


def of_two_nodes(node_rank, port):
    return Environment("none", 0, 0, node_rank, 2, 1, 2, "127.0.0.1", port)


@pytest.mark.parametrize(("node_rank", "missing"), [(0, 1), (1, 0)])
def test_a_node_that_does_not_come_is_named(node_rank, missing):
    port = free_port()
    environment = of_two_nodes(node_rank, port)
    with pytest.raises(ProcessError, match=rf"Node {missing} of 2 did not connect to 127.0.0.1:{port} within 0.3 s"):
        launch_workers(rank, static_agents(1, environment, timedelta(seconds=0.3)), is_local=False)


def test_a_signal_ends_the_wait_for_other_nodes():
    port = free_port()

    def interrupt_once_handled():
        wait_until(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_handled)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        launch_workers(rank, static_agents(1, of_two_nodes(0, port), MINUTE), is_local=False)
    interrupter.join()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ProcessError, match=rf"cannot listen on 127.0.0.1:{port} .*MASTER_PORT to a free port"):
            launch_workers(rank, static_agents(1, of_two_nodes(0, port), MINUTE), is_local=False)
