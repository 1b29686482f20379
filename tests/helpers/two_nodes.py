"""Two nodes on one machine: network namespaces that reach each other, but neither this machine nor the internet."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_server import MARK
from programs import ForkedProgram

INTERFACE = "node0"
NOBODY = "02:00:00:00:00:01"
"""An address that no interface has."""


@dataclass(frozen=True)
class Node:
    """One of two nodes: `command` returns the command line that runs a program there."""

    namespace: str
    address: str
    main_address: str
    """The address of node 0."""

    def command(self, *words):
        return ["ip", "netns", "exec", self.namespace, *words]

    def processes(self):
        """Return the ids of all processes on this node."""
        listed = ["ip", "netns", "pids", self.namespace]
        return [
            int(line) for line in subprocess.run(listed, capture_output=True, check=True, timeout=80).stdout.split()
        ]


@contextlib.contextmanager
def cut(*ways):
    """Silently drop everything that the first node of each pair sends to the second, inside the block."""
    with contextlib.ExitStack() as stack:
        for sender, receiver in ways:
            lead = ["ip", "-n", sender.namespace, "neigh"]
            to = [receiver.address, "dev", INTERFACE]
            stack.callback(subprocess.run, [*lead, "del", *to], check=True, timeout=80)
            subprocess.run([*lead, "replace", *to, "lladdr", NOBODY, "nud", "permanent"], check=True, timeout=80)
        yield


@contextlib.contextmanager
def two_nodes():
    """Provide two nodes joined by a cable; skip the test if they cannot be made, or fail it in CI."""
    names = [f"echelon-{os.getpid()}-{rank}" for rank in range(2)]
    nodes = [Node(name, f"10.77.0.{rank + 1}", "10.77.0.1") for rank, name in enumerate(names)]
    try:
        reason = _connect(nodes)
        if reason:
            absent(f"no network namespaces here, which need root and iproute2: {reason}")
        yield nodes
    finally:
        for name in names:
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "del", name], check=True, timeout=80)


def _connect(nodes):
    """Make the namespaces and the cable; return the reason if it could not be done."""
    if shutil.which("ip") is None:
        return "there is no `ip` on PATH"
    first, second = (node.namespace for node in nodes)
    steps = [f"netns add {first}", f"netns add {second}"]
    steps.append(f"link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}")
    for node in nodes:
        inside = f"-n {node.namespace}"
        steps.append(f"{inside} address add {node.address}/24 dev {INTERFACE}")
        steps += [f"{inside} link set lo up", f"{inside} link set {INTERFACE} up"]
    for step in steps:
        done = subprocess.run(["ip", *step.split()], capture_output=True, text=True, timeout=80, check=False)
        if done.returncode:
            return f"ip {step}: {done.stderr.strip()}"
    for node in nodes:
        _await_carrier(node)
    return None


def _await_carrier(node):
    """Wait until the kernel has seen both ends of the cable: before that, TensorPipe considers the interface absent."""
    end = time.monotonic() + 80
    while time.monotonic() < end:
        shown = ["ip", "-n", node.namespace, "-oneline", "link", "show", "dev", INTERFACE]
        if " state UP " in subprocess.run(shown, capture_output=True, text=True, timeout=80, check=True).stdout:
            return
        time.sleep(0.02)
    raise AssertionError(f"{INTERFACE} of {node.namespace} does not come up")


def absent(reason):
    """Skip a test that this machine cannot run; fail it in CI, which installs what it needs."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def run_together(commands, *, timeout=400.0, cwd=None):
    """Run pairs of (command, variables) in parallel and return (exit code, output) of each.

    Nothing that they start outlives the call. The variables are added to a few basic ones: a launcher's are not passed
    on.
    """
    mark = uuid.uuid4().hex
    end = time.monotonic() + timeout
    try:
        with tempfile.TemporaryDirectory() as place:
            outputs = [Path(place, str(number)) for number in range(len(commands))]
            running = [
                start(command, {**variables, MARK: mark}, output, cwd)
                for (command, variables), output in zip(commands, outputs, strict=True)
            ]
            try:
                codes = [one.wait(max(0.1, end - time.monotonic())) for one in running]
            except subprocess.TimeoutExpired as error:
                told = "\n".join(
                    f"{one.args}:\n{output.read_text()}" for one, output in zip(running, outputs, strict=True)
                )
                raise AssertionError(f"not done after {timeout} s\n{told}") from error
            return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]
    finally:
        kill_marked(mark)


def kill_marked(mark):
    """Kill all processes started with MARK=mark, and return their ids; torchrun's are in sessions of their own."""
    killed = []
    for folder in _marked(mark):
        with contextlib.suppress(OSError):  # it has ended
            killed.append(int(folder.name))
            os.kill(killed[-1], signal.SIGKILL)
    return killed


def left_behind(mark, patience=60.0):
    """Kill all processes with MARK=mark that do not end soon, and return their command lines.

    A program's fork server ends after the program, when it sees the end of a pipe.
    """
    end = time.monotonic() + patience
    while (left := running(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    kill_marked(mark)
    return left


def running(mark):
    """Return the command lines of all processes that were started with MARK=mark."""
    found = []
    for folder in _marked(mark):
        with contextlib.suppress(OSError):  # it has ended
            found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


def _marked(mark):
    """Yield the folders in /proc of the processes that were started with MARK=mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield folder


def start(command, variables, output, cwd=None):
    """Start a command that writes to a file; Python programs run in a forked process, also on a node."""
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1", **variables}
    namespace, words = (command[3], command[4:]) if command[:3] == ["ip", "netns", "exec"] else (None, command)
    if words[0] == sys.executable:
        return ForkedProgram(words[1:], folder=Path(cwd or "."), environ=environ, output=output, namespace=namespace)
    with output.open("w") as file:
        return subprocess.Popen(command, cwd=cwd, env=environ, stdout=file, stderr=subprocess.STDOUT, text=True)
