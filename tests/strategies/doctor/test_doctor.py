"""`echelon doctor` finds what was broken on purpose, its remedies work, and a sound machine has no findings."""

import ctypes
import functools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid

import pytest
from two_nodes import absent, run_together, two_nodes

from echelon import EchelonError
from echelon.strategies.doctor import folder as run_folder
from echelon.strategies.doctor.examine import Patient, examine_machine
from echelon.strategies.doctor.machine import check_limits, check_threads
from echelon.strategies.doctor.peers import compare_versions
from echelon.testing import run_ranks
from echelon.trainer.cli.main import main

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET, MS_REC, MS_PRIVATE, MS_RDONLY, MS_REMOUNT = (
    *(0x20000, 0x4000000, 0x40000000),
    *(1 << 14, 1 << 18, 1, 32),
)


def libc(name, *args):
    """Call a function of the system; an OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=80)


def mount(kind, path, flags=0, options=""):
    libc("mount", kind.encode(), os.fsencode(path), kind.encode(), ctypes.c_ulong(flags), options.encode())


def alone():
    """Move this process into its own namespaces, with a network that works."""
    libc("unshare", CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
    libc("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    ip("link", "set", "lo", "up")


class Loopback:
    check = "loopback"

    def break_it(self):
        ip("link", "set", "lo", "down")

    def mend(self, remedy):
        assert remedy == "ip link set lo up"
        ip(*remedy.split()[1:])


class Interface:
    check = "interfaces"

    def break_it(self):
        os.environ["GLOO_SOCKET_IFNAME"] = "eth77"

    def mend(self, remedy):
        assert remedy == "unset GLOO_SOCKET_IFNAME"
        del os.environ["GLOO_SOCKET_IFNAME"]


class Port:
    check = "port"

    def __init__(self):
        self.port = 29511

    def patient(self, folder):
        return Patient(folder, port=self.port)

    def break_it(self):
        self.taken = socket.create_server(("127.0.0.1", self.port))

    def mend(self, remedy):
        self.port = int(remedy.rsplit(" ", 1)[1])


class Name:
    """The host where nodes meet has no address."""

    check = "name resolution"

    def patient(self, folder):
        return Patient(folder, host="node-of-nobody", port=29512)

    def break_it(self):
        pass

    def mend(self, remedy):
        assert "/etc/hosts" in remedy
        hosts = f"/tmp/{uuid.uuid4().hex}"
        with open("/etc/hosts") as old, open(hosts, "w") as new:
            new.write(old.read() + "127.0.0.1 node-of-nobody\n")
        libc("mount", hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(4096), None)
        os.unlink(hosts)


class OwnName:
    check = "name resolution"

    def break_it(self):
        socket.sethostname("nameless-of-nobody")

    def mend(self, remedy):
        assert "nameless-of-nobody" in remedy and ">> /etc/hosts" in remedy
        Name.mend(self, remedy.replace("nameless-of-nobody", "node-of-nobody"))
        socket.sethostname("node-of-nobody")


class Route:
    """This node has no address in the network of the other."""

    check = "route"

    def patient(self, folder):
        return Patient(folder, host="10.78.0.2", port=29513)

    def break_it(self):
        ip("link", "add", "here", "type", "veth", "peer", "name", "there")
        ip("link", "set", "here", "up")

    def mend(self, remedy):
        assert "ip address add" in remedy
        ip("address", "add", "10.78.0.2/24", "dev", "here")


class Peer:
    """The other node's link is down."""

    check = "route"

    def patient(self, folder):
        return Patient(folder, host="10.79.0.2", port=29514)

    def break_it(self):
        self.name = f"echelon-{os.getpid()}"
        ip("netns", "add", self.name)
        try:
            ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", self.name)
            ip("address", "add", "10.79.0.1/24", "dev", "here")
            ip("link", "set", "here", "up")
            ip("-n", self.name, "address", "add", "10.79.0.2/24", "dev", "there")
        except subprocess.CalledProcessError:
            self.end()
            raise

    def mend(self, remedy):
        assert "ip link set ... up" in remedy
        ip("-n", self.name, "link", "set", "there", "up")
        time.sleep(0.5)

    def end(self):
        ip("netns", "del", self.name)


class Limit:
    def __init__(self, check, kind, value, remedy):
        self.check, self.kind, self.value, self.remedy = check, kind, value, remedy

    def break_it(self):
        resource.setrlimit(self.kind, (self.value, resource.getrlimit(self.kind)[1]))

    def mend(self, remedy):
        assert remedy == self.remedy
        given = remedy.split()[2]
        most = resource.getrlimit(self.kind)[1]
        resource.setrlimit(self.kind, (most if given == "unlimited" else int(given), most))


class SharedMemory:
    check = "shared memory"

    def break_it(self):
        mount("tmpfs", "/dev/shm", options="size=1m")

    def mend(self, remedy):
        assert "remount,size=8G" in remedy
        mount("tmpfs", "/dev/shm", MS_REMOUNT, "size=8G")


class ReadOnly:
    check = "run folder"

    def break_it(self):
        mount("tmpfs", self.folder, options="size=2g")
        mount("tmpfs", self.folder, MS_REMOUNT | MS_RDONLY)

    def mend(self, remedy):
        assert "remount,rw" in remedy
        mount("tmpfs", self.folder, MS_REMOUNT)


class Threads:
    check = "threads"

    def break_it(self):
        os.environ["OMP_NUM_THREADS"] = "512"

    def mend(self, remedy):
        os.environ["OMP_NUM_THREADS"] = remedy.split(",")[0].split("=")[1]


class Temporary:
    check = "temporary files"

    def break_it(self):
        long = self.folder / ("long" * 25)
        long.mkdir()
        self.set(str(long))

    def mend(self, remedy):
        assert remedy == "export TMPDIR=/tmp"
        self.set("/tmp")

    def set(self, folder):
        import tempfile

        os.environ["TMPDIR"], tempfile.tempdir = folder, None


BROKEN = {
    "loopback down": Loopback,
    "interface that is not here": Interface,
    "port taken": Port,
    "host without an address": Name,
    "own name without an address": OwnName,
    "no route": Route,
    "link of the other node down": Peer,
    "few files": functools.partial(Limit, "file descriptors", resource.RLIMIT_NOFILE, 200, "ulimit -n 4096"),
    "small files": functools.partial(Limit, "file size", resource.RLIMIT_FSIZE, 1 << 26, "ulimit -f unlimited"),
    "little shared memory": SharedMemory,
    "run folder read-only": ReadOnly,
    "more threads than cores": Threads,
    "sockets with a long path": Temporary,
}


def examine_broken(kind, folder):
    """Break this process's surroundings; return what the doctor finds before, then, and after its remedy."""
    alone()
    broken = kind()
    broken.folder = folder
    patient = getattr(broken, "patient", Patient)
    before = (
        [] if kind in (Name, Route, Peer) else examine_machine(patient(folder))
    )  # those are broken from the beginning
    broken.break_it()
    try:
        found = examine_machine(patient(folder))
        of_check = [finding for finding in found if finding.check == broken.check]
        if of_check:
            broken.mend(of_check[0].remedy)
        return before, found, examine_machine(patient(folder)), broken.check
    finally:
        getattr(broken, "end", int)()


@functools.cache
def reason_for_no_namespaces():
    """Return why a process cannot enter its own namespaces here; None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` on PATH"
    try:
        [reason] = run_ranks(try_alone, 1)
    except EchelonError as error:
        return str(error)
    return reason


def try_alone():
    try:
        alone()
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_and_its_remedy_works(name, tmp_path):
    if reason_for_no_namespaces():
        absent(f"no namespaces here, which need root and iproute2: {reason_for_no_namespaces()}")
    [(before, found, after, check)] = run_ranks(examine_broken, 1, BROKEN[name], tmp_path)
    assert before == []
    assert [finding.check for finding in found] == [check]
    assert found[0].remedy in found[0].describe()
    assert after == []


def test_a_clock_that_is_not_that_of_the_files_is_found(tmp_path):
    if shutil.which("faketime") is None:
        pytest.skip("there is no `faketime` on PATH")
    words = [sys.executable, "-m", "echelon", "doctor", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(["faketime", "-f", "+100s", *words], capture_output=True, text=True, timeout=400, check=False)
    report = json.loads(done.stdout)
    assert [one["check"] for one in report["findings"]] == ["clock"] and "+100" in report["findings"][0]["text"]
    assert "set-ntp" in report["findings"][0]["remedy"] and done.returncode == 0
    assert list(run_folder.check_folder(tmp_path)) == []


def test_timeouts_that_do_not_nest_are_found_by_the_command(tmp_path, capsys):
    assert main(["doctor", "--folder", str(tmp_path), "--hang-timeout", "3600", "--json"]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "timeouts" and "3600 s" in finding["text"] and "below 1800 s" in finding["remedy"]
    assert main(["doctor", "--folder", str(tmp_path), "--hang-timeout", "1700"]) == 0
    assert main(["doctor", "--folder", str(tmp_path), "--start-timeout", "3600"]) == 1
    assert "start_timeout below 1800" in capsys.readouterr().out


def test_a_sound_machine_has_no_finding(tmp_path, capsys):
    assert main(["doctor", "--folder", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Checked: torch and its devices, ") and said.endswith(".\nNo problems were found.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc", "0"],
        ["--port", "x"],
        ["--timeout", "-1"],
        ["--rdzv", "a", "--port", "3"],
        ["--rdzv", "a:b:c"],
        ["--rdzv", ""],
    ],
)
def test_wrong_commands_are_refused(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["doctor", *words])
    assert error.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_locked_memory_and_threads_and_versions_are_judged():
    few = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = [one.check for one in check_limits(has_infiniband=True)]
    assert ("locked memory" in found) == (0 <= few < 1 << 30)
    assert [one.check for one in check_threads(1, {"OMP_NUM_THREADS": "many"})] == ["threads"]
    assert list(check_threads(1, {"OMP_NUM_THREADS": "1,2"})) == []
    [found] = check_threads(1000, {"OMP_NUM_THREADS": "1"})
    assert found.remedy.startswith("start fewer processes")
    same = {"torch": "2.11", "Python": "3.11"}
    assert list(compare_versions(1, same, same)) == []
    [found] = compare_versions(1, {**same, "torch": "2.10"}, same)
    assert found.stops and found.remedy == "pip install torch==2.11"


def launched(node, rank, folder, variables=None):
    command = [sys.executable, "-m", "echelon", "launch", "--nproc", "1", "--nnodes", "2", "--node-rank", str(rank)]
    command += ["--rdzv", node.main_address, "-m", "echelon", "doctor", "--folder", str(folder)]
    return node.command(*command), variables or {}


def test_two_nodes_measure_the_way_between_them(tmp_path):
    with two_nodes() as nodes:
        folders = [tmp_path / "one", tmp_path / "other"]
        folders[1].mkdir()
        ends = run_together([launched(node, rank, folders[rank]) for rank, node in enumerate(nodes)])
    for code, output in ends:
        assert code == 0, output
    text = ends[0][1]
    assert "node 1 (10.77.0.2)" in text and text.count(" MB/s") == 2 and " ms, " in text
    assert "is not the same folder on node 1 and on node 0" in text and "0 error(s)" in text
    assert list(tmp_path.rglob("*")) == [folders[1]]  # the first did not exist before
