"""`echelon launch --nodes`: programs restart after faults and when nodes join; it ends the way that they end."""

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from launched_fit import fit
from programs import WatchedProgram
from two_nodes import INTERFACE, MARK, left_behind, run_together, two_nodes

from echelon.strategies.launch.failures import Failure, WorkerExit
from echelon.trainer.cli.launch_elastic import code_of_end
from echelon.trainer.cli.main import main

ECHELON = [sys.executable, "-c", "import sys; from echelon.trainer.cli.main import main; sys.exit(main())", "launch"]
HERE = Path(__file__).parent
COMES_LATER = """
import os, sys, time
from echelon.trainer.cli.main import main
while not os.path.exists(os.environ["WAITS"]):
    time.sleep(0.05)
sys.exit(main())
"""

PROGRAM = """
import os, signal, sys
line = " ".join([__name__, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]])
os.write(1, f"{line}\\n".encode())  # whole: the pipe is shared, and the end may come at once
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.write(1, b"ready\\n")
    signal.pause()
elif os.environ["RANK"] == "1":
    raise ValueError("no such luck")
"""


@pytest.fixture
def folder():
    """A working directory with a program, and one next to it for temporary files: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="e-") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        (folder / "work" / "program.py").write_text(PROGRAM)
        (folder / "temporary").mkdir()
        yield folder


def start(folder, *options, **variables):
    environ = {**os.environ, "TMPDIR": str(folder / "temporary"), MARK: str(folder), **variables}
    return WatchedProgram([*ECHELON[1:], "--nproc", "2", *options], folder=folder / "work", environ=environ)


def end(launch, folder):
    """Return what a launch has written since, and its exit code; check that nothing of it is left."""
    try:
        output, errors = launch.communicate(timeout=400)
    finally:
        left = left_behind(folder)
    assert left == []
    assert [name for name in os.listdir(folder / "temporary") if not name.startswith("torchinductor_")] == []
    return output.splitlines(), errors, launch.returncode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nodes 3:2 train.py", "argument --nodes: must be a number from 1 or MIN:MAX such as 1:4, got '3:2'"),
        ("--nodes 1:4 train.py", "--nodes 4 needs --rdzv HOST[:PORT]"),
        ("--nodes 2 --nnodes 2 --rdzv a train.py", "argument --nnodes: not allowed with argument --nodes"),
        ("--nodes 2 --node-rank 0 --rdzv 127.0.0.1 train.py", "--node-rank 0: elastic nodes get their ranks when they"),
    ],
)
def test_options_that_cannot_be(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--nproc", "2", *options.split()])
    assert message in capsys.readouterr().err


def test_processes_that_fail_start_again_until_that_is_of_no_use(folder):
    output, errors, code = end(start(folder, "--max-restarts", "1", "-m", "program", "raise", "--nproc", "9"), folder)
    assert code == 1
    assert output.count("__main__ rank 1 of 2 raise --nproc 9") == 2
    ended = r"Rank 1 of 2 \(process \d+\) failed with ValueError: no such luck"
    assert re.search(rf"^echelon: Round 0 ended: {ended}. The workers start again.$", errors, re.MULTILINE)
    assert re.search(rf"program.py\", line 10, in <module>\n.*^{ended}$", errors, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("exit_code", "error", "code"),
    [
        (-signal.SIGKILL, None, 137),
        (5, None, 5),
        (1, SystemExit(3), 3),
        (1, SystemExit("why"), 1),
        (1, ValueError(), 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(exit_code, error, code):
    assert code_of_end(WorkerExit(1, 2, 4711, exit_code, None if error is None else Failure.of(error))) == code


def test_a_signal_reaches_the_processes_and_is_the_exit_code(folder):
    launch = start(folder, "--nodes", "1", "program.py", "wait")
    lines = [launch.readline() for _ in range(4)]
    launch.send_signal(signal.SIGTERM)
    _, errors, code = end(launch, folder)
    assert lines.count("ready\n") == 2
    assert (code, "ended by a signal" in errors) == (143, True)


def test_training_that_is_killed_ends_as_if_it_had_not_been(folder, tmp_path):
    found = tmp_path / "weights.pt"
    program = str(HERE / "launched_fit.py")
    _, errors, code = end(start(folder, "--nodes", "1", program, str(found), "kill:rank=1@step=10"), folder)
    assert code == 0, errors
    assert "was killed by SIGKILL" in errors
    for name, expected in fit("auto").items():
        torch.testing.assert_close(torch.load(found)[name], expected, atol=1e-12, rtol=0)


def test_a_node_that_comes_is_let_in():
    with two_nodes() as nodes:
        first, second = (
            [*ECHELON, "--nproc", "1", "--nodes", "1:2", "--rdzv", "10.77.0.1", str(HERE / "waiting_member.py")]
            for _ in nodes
        )
        mark = f"/tmp/{nodes[0].namespace}"
        second = [sys.executable, "-c", COMES_LATER, *second[len(ECHELON) - 1 :]]
        commands = [(one.command(*words), {"WAITS": mark}) for one, words in zip(nodes, (first, second), strict=True)]
        try:
            done = run_together(commands)
        finally:
            Path(mark).unlink(missing_ok=True)
    assert [code for code, _ in done] == [0, 0], "\n".join(output for _, output in done)
    found = [json.loads(line) for _, output in done for line in output.splitlines() if line.startswith("{")]
    assert [(seen["rank"], seen["node_rank"], seen["total"]) for seen in found] == [(0, 0, 11.0), (1, 1, 11.0)]
    assert {seen["interface"] for seen in found} == {INTERFACE}
    assert "Round 1 begins: this is node 0 of 2" in done[0][1]
