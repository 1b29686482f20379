"""The batch script for SLURM, run by bash with stand-ins that act as SLURM's commands were seen to act."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from printed import CLUSTER, ROOT, config

from echelon.trainer.cli.render import render_target

SCRIPTS = [ROOT / "deploy" / "train.sbatch", CLUSTER.with_suffix("") / "train.sbatch"]
SRUN = """
echo "$*" >> srun
while [ "$1" != echelon ]; do shift; done
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & pids="${pids:-} $!"; done
trap 'kill -KILL $pids' TERM  # as srun does
echo "$pids" > starting && mv starting nodes
code=0
for pid in $pids; do wait "$pid" || code=$?; done
exit "$code"
"""
ECHELON = """
echo "$*" >> "echelon-$1"
if [ "$1" = rendezvous ]; then echo $$ > rendezvous.pid; exec python3 -c "$LISTEN" "${3%:*}" "${3#*:}"; fi
[ -z "${CODE:-}" ] || exit "$CODE"
trap 'kill $!; exit 143' TERM
sleep 60 &
echo ready
wait
"""
LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    while True:
        server.accept()[0].close()
"""
SCANCEL = """echo "$*" > scancel; kill -TERM $(cat nodes)"""
SCONTROL = """echo "$*" > scontrol"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_bash_and_shellcheck_find_nothing_wrong(script):
    # SC1090, SC1091: what the lines of the user read is not here; SC2016: what they set is meant literally
    for command in (["bash", "-n"], [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1090,SC1091,SC2016"]):
        done = subprocess.run([*command, script], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    """A working directory with commands of SLURM's names, and Echelon's."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("echelon", ECHELON), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}")
        file.chmod(0o700)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    return tmp_path


def start(folder, script, **environ):
    environ = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "LISTEN": LISTEN,
        **environ,
    }
    return subprocess.Popen(["bash", script], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)


def end(job, folder):
    """Return the exit code of a script; nothing of it is left."""
    job.communicate(timeout=120)
    rendezvous = folder / "rendezvous.pid"
    if rendezvous.exists():
        assert not Path(f"/proc/{rendezvous.read_text().strip()}").exists()
    return job.returncode


def wait_until_ready(job, folder, nodes=2):
    assert [job.stdout.readline() for _ in range(nodes)] == ["ready\n"] * nodes
    while nodes > 1 and not (folder / "nodes").exists():  # the test's own time limit ends it
        time.sleep(0.01)


def test_each_node_gets_an_agent_that_meets_the_others_at_the_first(folder):
    job = start(folder, SCRIPTS[0], CODE="0")
    assert end(job, folder) == 0
    (listening,) = (folder / "echelon-rendezvous").read_text().splitlines()
    endpoint = listening.removeprefix("rendezvous --listen ")
    assert endpoint.endswith(f":{29400 + 4242 % 1000}")
    agents = (folder / "echelon-launch").read_text().splitlines()
    launch = f"launch --nodes 1:2 --rdzv {endpoint} --run-id 4242 --nproc 2 --max-restarts 10"
    program = "-m echelon fit deploy/digits.yaml trainer.default_root_dir=runs/digits ckpt_path=last"
    assert agents == [f"{launch} {program}"] * 2
    (options,) = (folder / "srun").read_text().splitlines()
    assert options.startswith("--ntasks=2 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 echelon launch ")
    assert not (folder / "scontrol").exists()


def test_a_job_whose_time_is_up_saves_and_is_queued_again(folder):
    with start(folder, SCRIPTS[0]) as job:
        wait_until_ready(job, folder)
        job.send_signal(signal.SIGUSR1)
        assert end(job, folder) == 143
    assert (folder / "scancel").read_text() == "--signal=TERM 4242\n"
    assert (folder / "scontrol").read_text() == "requeue 4242\n"


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(folder):
    with start(folder, SCRIPTS[0]) as job:
        wait_until_ready(job, folder)
        # the signal reaches the script, the processes it has started, and the nodes
        for pid in (job.pid, int((folder / "rendezvous.pid").read_text())):
            os.kill(pid, signal.SIGTERM)
        assert Path(f"/proc/{(folder / 'rendezvous.pid').read_text().strip()}").exists()
        for pid in (folder / "nodes").read_text().split():
            os.kill(int(pid), signal.SIGTERM)
        assert end(job, folder) == 143
    assert not (folder / "scontrol").exists()


def test_the_exit_code_of_a_failed_run_is_that_of_the_job(folder):
    assert end(start(folder, SCRIPTS[0], CODE="3"), folder) == 3
    assert not (folder / "scontrol").exists()


def test_a_job_without_a_place_to_meet_starts_no_node(folder):
    (folder / "bin" / "echelon").write_text("#!/bin/bash\nexit 1\n")
    assert end(start(folder, SCRIPTS[0]), folder) == 1
    assert not (folder / "srun").exists()


def test_one_node_needs_nothing_to_meet_at(folder):
    script = folder / "one.sbatch"
    overrides = ["module.lr=0.1", "deploy.name=second"]
    text = render_target("slurm", config(folder, {"gpus": 4, "runs": "my runs"}), overrides)
    script.write_text(text)
    assert end(start(folder, script, CODE="0", SLURM_JOB_NUM_NODES="1"), folder) == 0
    (agent,) = (folder / "echelon-launch").read_text().splitlines()
    assert agent == (
        f"launch --nodes 1 --nproc 4 --max-restarts 10 -m echelon fit {folder}/config.yaml module.lr=0.1 "
        "trainer.default_root_dir=my runs/second ckpt_path=last"
    )
    assert not (folder / "echelon-rendezvous").exists()
