"""File for Docker Compose: nodes on one machine, and their rendezvous."""

from __future__ import annotations

from typing import Final

from .deploy import parse_size
from .deployed_run import CONFIG, ENV, RUNS, DeployedRun
from .yaml_text import yaml_text

_NOTES: Final = {
    "services.rendezvous": "no port is published: it needs no password, so only this project may reach it",
    "node.deploy": "`docker compose up --scale node=2`, at any time, and the run shrinks or grows",
    "init": "so that the command is not process 1, which ignores signals without a handler",
    "stop_grace_period": "from SIGTERM to SIGKILL: time to finish a step and to save a checkpoint",
    "shm_size": "for snapshots and data loader workers (64 MiB without this)",
    "read_only": "files are written only to /runs, /tmp and /dev/shm",
    "configs.config": "the run itself, as `echelon fit` takes it ($$ is $)",
}


def render_compose(run: DeployedRun) -> str:
    """Return the file."""
    heading = "`docker compose up -d` starts the run, `docker compose stop` ends it after a checkpoint."
    services = (
        {"rendezvous": _rendezvous_service(run), "node": _node_service(run)}
        if run.has_rendezvous
        else {"node": _node_service(run)}
    )
    file = {
        "name": run.deploy.name,
        "services": services,
        "configs": {"config": {"content": run.text.replace("$", "$$")}},
        **({} if run.uses_store else {"volumes": {run.deploy.runs: {}}}),
    }
    return yaml_text([file], heading, _NOTES)


def _security_settings(run: DeployedRun) -> dict[str, object]:
    return {
        "user": f"{run.deploy.user}:{run.deploy.user}",
        "init": True,
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _rendezvous_service(run: DeployedRun) -> dict[str, object]:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {run.deploy.port}), 5)"
    return {
        "image": run.image,
        "command": run.rendezvous_command("0.0.0.0"),
        "environment": {**ENV, "OMP_NUM_THREADS": "1"},
        "healthcheck": {
            "test": ["CMD", "python", "-c", connect],
            "interval": "5s",
            "start_period": "60s",
        },
        "restart": "unless-stopped",
        "deploy": {"resources": {"limits": {"cpus": "1", "memory": "1g"}}},
        **_security_settings(run),
    }


def _node_service(run: DeployedRun) -> dict[str, object]:
    deploy = run.deploy
    rendezvous = {"depends_on": {"rendezvous": {"condition": "service_healthy"}}} if run.has_rendezvous else {}
    return {
        "image": run.image,
        "command": [word.replace("$", "$$") for word in run.node_command("rendezvous")],
        **rendezvous,
        "environment": {
            **ENV,
            **{name: value.replace("$", "$$") for name, value in deploy.env.items()},
        },
        **({} if deploy.secret is None else {"env_file": [deploy.secret]}),
        "deploy": {"replicas": deploy.max_nodes, "resources": _resource_limits(run)},
        "restart": f"on-failure:{deploy.max_restarts}",
        "stop_grace_period": f"{deploy.grace}s",
        "shm_size": _size_in_mebibytes(deploy.shared_memory, "shared_memory"),
        **_security_settings(run),
        "configs": [{"source": "config", "target": CONFIG}],
        **({} if run.uses_store else {"volumes": [f"{deploy.runs}:{RUNS}"]}),
    }


def _resource_limits(run: DeployedRun) -> dict[str, object]:
    deploy = run.deploy
    resources: dict[str, object] = {
        "limits": {"cpus": str(deploy.cpus), "memory": _size_in_mebibytes(deploy.memory, "memory")},
    }
    if deploy.gpus:
        devices = [{"driver": "nvidia", "count": deploy.gpus, "capabilities": ["gpu"]}]
        resources["reservations"] = {"devices": devices}
    return resources


def _size_in_mebibytes(text: str, name: str) -> str:
    return f"{parse_size(text, name) >> 20}m"
