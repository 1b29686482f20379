"""A file for Docker Compose: nodes on one machine, and the service where they meet."""

from __future__ import annotations

from typing import Any, Final

from .deploy import size
from .job import CONFIG, ENV, RUNS, Job
from .yaml_text import yaml_text

_NOTES: Final = {
    "services.rendezvous": "no port is published: only the services of this project reach it, as it asks nobody for a "
    "password",
    "node.deploy": "`docker compose up --scale node=2`, at any time, and the run shrinks or grows",
    "init": "so that the command is not process 1, which ignores signals that nobody handles",
    "stop_grace_period": "from SIGTERM to SIGKILL: a step is finished and a checkpoint saved meanwhile",
    "shm_size": "for snapshots and the workers of data loaders (64 MiB without this)",
    "read_only": "what is written goes to /runs, /tmp and /dev/shm",
    "configs.config": "the run itself, as `echelon fit` takes it ($$ is $)",
}


def render(job: Job) -> str:
    """Return the file."""
    heading = "`docker compose up -d` starts the run, `docker compose stop` ends it after a checkpoint."
    services = {"rendezvous": _rendezvous(job), "node": _node(job)} if job.meets else {"node": _node(job)}
    file = {
        "name": job.deploy.name,
        "services": services,
        "configs": {"config": {"content": job.text.replace("$", "$$")}},
        "volumes": {job.deploy.runs: {}},
    }
    return yaml_text([file], heading, _NOTES)


def _locked(job: Job) -> dict[str, Any]:
    return {
        "user": f"{job.deploy.user}:{job.deploy.user}",
        "init": True,
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _rendezvous(job: Job) -> dict[str, Any]:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {job.deploy.port}), 5)"
    return {
        "image": job.image,
        "command": job.rendezvous("0.0.0.0"),
        "environment": {**ENV, "OMP_NUM_THREADS": "1"},
        "healthcheck": {
            "test": ["CMD", "python", "-c", connect],
            "interval": "5s",
            "start_period": "60s",
        },
        "restart": "unless-stopped",
        "deploy": {"resources": {"limits": {"cpus": "1", "memory": "1g"}}},
        **_locked(job),
    }


def _node(job: Job) -> dict[str, Any]:
    deploy = job.deploy
    meeting = {"depends_on": {"rendezvous": {"condition": "service_healthy"}}} if job.meets else {}
    return {
        "image": job.image,
        "command": [word.replace("$", "$$") for word in job.in_container("rendezvous")],
        **meeting,
        "environment": {
            **ENV,
            **{name: value.replace("$", "$$") for name, value in deploy.env.items()},
        },
        "deploy": {"replicas": deploy.max_nodes, "resources": _resources(job)},
        "restart": f"on-failure:{deploy.max_restarts}",
        "stop_grace_period": f"{deploy.grace}s",
        "shm_size": _size(deploy.shared_memory, "shared_memory"),
        **_locked(job),
        "configs": [{"source": "config", "target": CONFIG}],
        "volumes": [f"{deploy.runs}:{RUNS}"],
    }


def _resources(job: Job) -> dict[str, Any]:
    deploy = job.deploy
    resources: dict[str, Any] = {
        "limits": {"cpus": str(deploy.cpus), "memory": _size(deploy.memory, "memory")},
    }
    if deploy.gpus:
        devices = [{"driver": "nvidia", "count": deploy.gpus, "capabilities": ["gpu"]}]
        resources["reservations"] = {"devices": devices}
    return resources


def _size(text: str, name: str) -> str:
    return f"{size(text, name) >> 20}m"
