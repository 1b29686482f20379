"""The Kubernetes objects that every target there is made of: the pods of a run, and what stands around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .job import CONFIG, ENV, RUNS, Job
from .yaml_text import yaml_text

Object = dict[str, Any]

_NOTES: Final[Mapping[str, str]] = {
    "data.config.yaml": "the run itself, as `echelon fit` takes it",
    "unhealthyPodEvictionPolicy": "pods that are not ready train nothing: they do not stand in a drain's way",
    "minAvailable": "so many nodes are left by drains; the others are taken, save, and are made anew elsewhere",
    "policyTypes": "the rendezvous asks nobody for a password, and gloo and NCCL listen at any port: only the pods of "
    "this run may connect to each other",
    "terminationGracePeriodSeconds": "from SIGTERM to SIGKILL: a step is finished and a checkpoint saved meanwhile",
    "automountServiceAccountToken": "the run asks nothing of the cluster",
    "enableServiceLinks": "else the variables of all services of the namespace are set",
    "shareProcessNamespace": "so that the command is not process 1, which ignores signals that nobody handles and has "
    "to clear away the dead",
    "fsGroup": "the group to which the volume of the runs is given",
    "startupProbe": "the node folder in shared memory is there once the agent runs; whether the workers get on is the "
    "agent's to watch, which restarts them in seconds: no probe of Kubernetes could know better",
    "readOnlyRootFilesystem": "what is written goes to /runs, /tmp and /dev/shm",
    "limits": "the same as the requests: of pods such as these a machine in need of memory evicts the last",
    "strategy": "two stores at once would be two runs",
    "emptyDir.medium": "shared memory, for snapshots and the workers of data loaders (64 MiB without this); what is in "
    "it counts as memory of the pod",
}
"""Comments of `yaml_text` for what a reader may stumble over."""


def manifests(job: Job, objects: Sequence[Object], notes: Mapping[str, str]) -> str:
    """Return the objects of a target, after those around the pods of every run, with notes for those who read them."""
    name = job.deploy.name
    heading = f"`kubectl apply -f` starts the run {name!r}, `kubectl delete -f` ends it after a checkpoint."
    return yaml_text([*_surroundings(job), *objects], heading, {**_NOTES, **notes})


def _surroundings(job: Job) -> list[Object]:
    """Return the config, where nodes meet, and what keeps them from harm."""
    shared = [_config(job), _network_policy(job)]
    if not job.meets:
        return shared
    return [*shared, _budget(job), _rendezvous_service(job), _rendezvous(job)]


def metadata(job: Job, suffix: str = "") -> Object:
    """Return the metadata of an object, named by the run and what it is of it."""
    namespace: Object = {} if job.deploy.namespace is None else {"namespace": job.deploy.namespace}
    return {"name": f"{job.deploy.name}{suffix}", **namespace, "labels": labels(job)}


def labels(job: Job, component: str | None = None) -> Object:
    """Return the labels of all objects of a run, or of those of one component."""
    shared = {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": job.deploy.name}
    return shared if component is None else {**shared, "app.kubernetes.io/component": component}


def command(job: Job) -> list[str]:
    """Return the command of a node."""
    return [_literally(word) for word in job.in_container(f"{job.deploy.name}-rendezvous")]


def resources(job: Job) -> Object:
    """Return what a node needs."""
    deploy = job.deploy
    amounts = {"cpu": str(deploy.cpus), "memory": deploy.memory}
    if deploy.gpus:
        amounts[deploy.gpu_resource] = str(deploy.gpus)
    return {"requests": amounts, "limits": amounts}


def node_pod(job: Job, container: Mapping[str, Any], **spec: Any) -> Object:
    """Return the template of the pods that train.

    Args:
        container: its name and, where the target does not say them elsewhere, image, command and resources.
        spec: what the target adds to the pod.
    """
    volumes: dict[str, Object] = {
        "config": {"configMap": {"name": f"{job.deploy.name}-config"}},
        "runs": {"persistentVolumeClaim": {"claimName": job.deploy.runs}},
        "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": job.deploy.shared_memory}},
        "tmp": {"emptyDir": {}},
    }
    places = {"config": CONFIG.rpartition("/")[0], "runs": RUNS, "shared-memory": "/dev/shm", "tmp": "/tmp"}
    env = {**ENV, **job.deploy.env}
    started = ["sh", "-c", "ls -d /dev/shm/echelon-node-*"]
    whole = {
        **container,
        "env": [{"name": name, "value": _literally(value)} for name, value in env.items()],
        "startupProbe": {"exec": {"command": started}, "periodSeconds": 5, "failureThreshold": 360},
        "securityContext": _LOCKED,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
    }
    return {
        "metadata": {"labels": labels(job, "node"), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            **spec,
            "terminationGracePeriodSeconds": job.deploy.grace,
            **_pod(job),
            "containers": [whole],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        },
    }


_LOCKED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_LITTLE: Final = {"cpu": "250m", "memory": "1Gi"}


def _literally(text: str) -> str:
    """Return a text in which Kubernetes finds no variable."""
    return text.replace("$(", "$$(")


def _pod(job: Job) -> Object:
    user = job.deploy.user
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _config(job: Job) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, "-config"),
        "data": {"config.yaml": job.text},
    }


def _network_policy(job: Job) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job),
        "spec": {
            "podSelector": {"matchLabels": labels(job)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": labels(job)}}]}],
        },
    }


def _budget(job: Job) -> Object:
    # pods of a Job have no scale that Kubernetes could ask for: only a number that stays is possible
    left = min(job.deploy.min_nodes, job.deploy.max_nodes - 1)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job),
        "spec": {
            "minAvailable": left,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels(job, "node")},
        },
    }


def _rendezvous_service(job: Job) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, "-rendezvous"),
        "spec": {"selector": labels(job, "rendezvous"), "ports": [{"name": "store", "port": job.deploy.port}]},
    }


def _rendezvous(job: Job) -> Object:
    probe = {"tcpSocket": {"port": "store"}, "periodSeconds": 5}
    container = {
        "name": "rendezvous",
        "image": job.image,
        "command": job.rendezvous("0.0.0.0"),
        "env": [{"name": name, "value": value} for name, value in {**ENV, "OMP_NUM_THREADS": "1"}.items()],
        "ports": [{"name": "store", "containerPort": job.deploy.port}],
        "resources": {"requests": _LITTLE, "limits": _LITTLE},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "initialDelaySeconds": 60},
        "securityContext": _LOCKED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(job, "-rendezvous"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels(job, "rendezvous")},
            "template": {
                "metadata": {"labels": labels(job, "rendezvous")},
                "spec": {**_pod(job), "containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]},
            },
        },
    }
