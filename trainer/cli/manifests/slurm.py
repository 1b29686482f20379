"""Batch script for SLURM: one agent on each node, requeued when its time is up."""

from __future__ import annotations

import shlex
from typing import Final

from .deploy import parse_size
from .deployed_run import DeployedRun

_TEMPLATE: Final = """\
#!/bin/bash
# `sbatch` starts the run, `scancel` ends it after a checkpoint; all output is appended to one file.
{options}
# {grace} s before the time is up, a signal tells this script (and only this script: it tells the nodes):
#SBATCH --signal=B:USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# the loss of a node other than the first does not end the job:
#SBATCH --no-kill

set -u
{setup}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
{rendezvous}
# SIGTERM to srun would kill the nodes at once (\"forcing job termination\"), so scancel has to tell them. They finish
# the step, save a checkpoint and end with 143.
is_time_up=false
trap 'is_heard=true; is_time_up=true; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# A cancellation or preemption of the job has also signaled the nodes.
trap 'is_heard=true' TERM

# One agent per node, which starts the processes there. The end of one does not end the others.
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \\
    {launch} &
nodes=$!

is_heard=true
while $is_heard; do # a signal ends wait, not srun
    is_heard=false
    wait "$nodes"
    code=$?
    # bash forgets a process that ends just as a signal comes, and would wait for it forever
    if $is_heard && ! kill -0 "$nodes" 2>/dev/null && jobs -rp | grep -qx "$nodes"; then
        code=143
        break
    fi
done
{end}
if [ "$code" -eq 143 ] && $is_time_up; then
    scontrol requeue "$SLURM_JOB_ID" # it resumes from its newest checkpoint
fi
exit "$code"
"""

_RENDEZVOUS: Final = """
# Where the nodes meet: a process of this script, on the first node, so that it does not end with an agent. The
# address is that of the node's name, or of its first network if the name resolves to loopback, as on Debian. The
# signal that cancels the job reaches every process, but the nodes need this one to leave.
addresses=$(getent ahostsv4 "$(hostname)"; hostname -I | tr ' ' '\\n')
address=$(awk '$1 && !/^127\\./ {{ print $1; exit }}' <<< "$addresses")
address=${{address:-127.0.0.1}}
port=$(({port} + SLURM_JOB_ID % 1000))
(trap '' TERM && exec echelon rendezvous --listen "$address:$port") &
rendezvous=$!
# Without this store, the agent of this node would start its own.
until (: <> "/dev/tcp/$address/$port") 2>/dev/null; do
    kill -0 "$rendezvous" || exit 1
    sleep 0.5
done
"""


def render_script(run: DeployedRun) -> str:
    """Return the script."""
    setup = [*run.deploy.setup, *(f"export {name}={shlex.quote(value)}" for name, value in run.deploy.env.items())]
    return _TEMPLATE.format(
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in _sbatch_options(run).items()),
        grace=run.deploy.grace,
        setup="\n".join(setup),
        rendezvous=_RENDEZVOUS.format(port=run.deploy.port) if run.has_rendezvous else "",
        launch=_launch_command(run),
        end='kill -KILL "$rendezvous"\nwait "$rendezvous" 2>/dev/null\n' if run.has_rendezvous else "",
    )


def _sbatch_options(run: DeployedRun) -> dict[str, str]:
    deploy = run.deploy
    least, most = deploy.min_nodes, deploy.max_nodes
    optional = {"partition": deploy.partition, "account": deploy.account}
    return {
        "job-name": deploy.name,
        **{name: value for name, value in optional.items() if value is not None},
        # as many as are available; with ntasks-per-node, SLURM would give the minimum (22.05)
        "nodes": str(most) if least == most else f"{least}-{most}",
        "cpus-per-task": str(deploy.cpus),
        "mem": f"{parse_size(deploy.memory, 'memory') >> 20}M",
        **({"gpus-per-node": str(deploy.gpus)} if deploy.gpus else {}),
        "time": str(deploy.time),
    }


def _launch_command(run: DeployedRun) -> str:
    rendezvous = ' --rdzv "$address:$port" --run-id "$SLURM_JOB_ID"' if run.has_rendezvous else ""
    program = shlex.join(run.program(run.path, run.overrides, run.deploy.runs))
    return f"echelon launch --nodes {run.nodes}{rendezvous} {shlex.join(run.process_options)} \\\n    {program}"
