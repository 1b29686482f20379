"""A process of a launch: finds its place, meets the others, sums their ranks and prints what it saw, in JSON."""

import dataclasses
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.strategies.cluster.environment import reconcile_environment
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.launch.launcher import launch_workers, static_agents

LISTENING = "0A"


def listening(*pids):
    """Return the addresses, as the kernel writes them, on which these processes accept connections."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]") if file.is_symlink() else "")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes})


def main():
    environment = reconcile_environment(detect_environment(), None, None)
    limit = timedelta(seconds=40)
    ProcessGroup(environment, torch.device("cpu"), start_timeout=limit, timeout=limit).join()
    total = torch.tensor(10.0**environment.rank, dtype=torch.float64)
    dist.all_reduce(total)
    seen = {"total": total.item(), "listening": listening(os.getpid(), os.getppid()), "line": environment.describe()}
    seen["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
    line = json.dumps(dataclasses.asdict(environment) | seen)
    os.write(1, f"{line}\n".encode())  # whole, where the processes share a pipe
    dist.barrier()


def launch_members(number):
    """Start a number of them on this node, one of two, which has been told its rank by NODE_RANK."""
    environment = reconcile_environment(detect_environment(), number, 2)
    launch_workers(main, static_agents(number, environment, timedelta(seconds=40)), is_local=environment.num_nodes == 1)


if __name__ == "__main__":
    launch_members(int(sys.argv[2])) if sys.argv[1:2] == ["--launch"] else main()
