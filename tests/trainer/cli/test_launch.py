"""``echelon launch``: what it refuses, what its processes get, and its exit codes."""

import os
import re
import signal
import sys

import pytest
import torch
from programs import WatchedProgram
from two_nodes import MARK, left_behind

from echelon.trainer.cli.main import main

ECHELON = [sys.executable, "-c", "import sys; from echelon.trainer.cli.main import main; sys.exit(main())", "launch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("train.py", "the following arguments are required: --nproc"),
        ("--nproc 0 train.py", "argument --nproc: must be a number from 1, gpu, cpu or auto, got '0'"),
        (
            "--nproc 2 --nnodes 3:2 train.py",
            "argument --nnodes: must be a number from 1 or MIN:MAX such as 1:4, got '3:2'",
        ),
        ("--nproc 2 --max-restarts -1 train.py", "argument --max-restarts"),
        ("--nproc 2 other.py", "there is no script 'other.py' in "),
        ("--nproc 2 --rdzv a train.py", "--rdzv a is for several nodes; give --nnodes, too"),
        ("--nproc 2 --node-rank 1 train.py", "--node-rank 1 is for several nodes"),
        ("--nproc 2 --nnodes 2 train.py", "--nnodes 2 needs --rdzv HOST[:PORT]"),
        (
            "--nproc 2 --nnodes 2 --rdzv a --node-rank 2 train.py",
            "--node-rank 2 with --nnodes 2: node ranks go from",
        ),
        ("--nproc 2 --nnodes 2 --rdzv 0.0.0.256 train.py", "--rdzv 0.0.0.256 cannot be used"),
        ("--nproc 2 --nnodes 2 --rdzv a:b:c train.py", "--rdzv a:b:c cannot be used"),
        ("--nproc 2 --nnodes 1:2 --rdzv a --node-rank 0 train.py", "for a fixed number of nodes, but --nnodes is 1:2"),
        ("--nproc 2 --nnodes 2 --rdzv a --node-rank 0 --max-restarts 3 train.py", "--max-restarts 3 on several nodes"),
    ],
)
def test_options_that_contradict_each_other_start_nothing(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as caught:
        main(["launch", *options.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_as_many_processes_as_gpus_are_refused_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--nproc", "gpu", "-m", "program"])
    assert "--nproc gpu, but torch finds no GPU here; give a number" in capsys.readouterr().err


def test_help_shows_how_one_and_two_machines_are_used(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("--nproc 2 train.py", "--nnodes 2 --node-rank 1 --rdzv 10.0.0.1 train.py", "exit codes:"):
        assert words in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


PROGRAM = """
import os, signal, sys
assert os.environ["OMP_NUM_THREADS"] == os.environ["EXPECTED_THREADS"]
line = " ".join(["rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]])
os.write(1, f"{line}\\n".encode())  # whole: the pipe is shared, and the end may come at once
if sys.argv[1:] == ["--wait"]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.write(1, b"ready\\n")
    signal.pause()
elif os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1:] == ["--killed"] else sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path):
    """A working directory with a program, and one next to it for temporary files."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "program.py").write_text(PROGRAM)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def start(folder, *options, program=tuple(ECHELON[1:])):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {
        "TMPDIR": str(folder / "temporary"),
        "PYTHONPATH": ".",
        MARK: str(folder),
        "EXPECTED_THREADS": str(threads),
    }
    return WatchedProgram([*program, *options], folder=folder / "work", environ=environ)


def end(launch, folder):
    """Return what a launch has written since, and its exit code; check that nothing of it is left."""
    try:
        output, errors = launch.communicate(timeout=240)
    finally:
        left = left_behind(folder)
    assert left == []
    assert os.listdir(folder / "temporary") == []
    return sorted(output.splitlines()), errors, launch.returncode


@pytest.mark.parametrize(
    ("program", "given", "code", "reason"),
    [
        (["-m", "program"], ["--lr", "1", "--nproc", "9"], 3, "exit code 3"),
        (["program.py"], ["--killed"], 137, "signal 9"),
    ],
    ids=["module", "killed"],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(folder, program, given, code, reason):
    output, errors, found = end(start(folder, "--nproc", "2", *program, *given), folder)
    lines = [" ".join(["rank", str(rank), "of 2", *given]) for rank in range(2)]
    assert lines[1] in output
    assert set(output) <= set(lines)
    assert found == code
    assert re.search(rf"^echelon: rank 1 \(pid \d+\) ended with {reason}; see its output$", errors, re.MULTILINE)


LAUNCHED_AND_ENDED = """
import os, signal, subprocess, sys
from echelon.trainer.cli.main import main

def end_at_first_process(frame, event, _):
    if event == "return" and frame.f_code is subprocess.Popen.__init__.__code__ and frame.f_locals["start_new_session"]:
        os.kill(os.getpid(), signal.SIGTERM)

sys.setprofile(end_at_first_process)
sys.exit(main())
"""


def test_a_signal_reaches_the_processes_and_is_the_exit_code(folder):
    launch = start(folder, "--nproc", "2", "program.py", "--wait")
    try:
        while [launch.readline() for _ in range(2)].count("ready\n") == 0:
            assert launch.poll() is None
        launch.send_signal(signal.SIGTERM)
    finally:
        _, errors, code = end(launch, folder)
    assert code == 143
    assert "echelon: ended by SIGTERM" in errors


def test_a_signal_while_processes_start_ends_those_that_were_started(folder):
    launch = start(folder, "--nproc", "2", "program.py", "--wait", program=["-c", LAUNCHED_AND_ENDED, "launch"])
    output, errors, code = end(launch, folder)
    assert code == 143
    assert "echelon: ended by SIGTERM" in errors
    assert "rank 1 of 2 --wait" not in output  # it was not started
