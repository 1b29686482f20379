"""A PyTorchJob of Kubeflow's training operator (kubeflow.org/v1): workers only, by its elastic policy."""

from __future__ import annotations

from typing import Any, Final

from . import kubernetes
from .job import Job

_NOTES: Final = {
    "elasticPolicy": "without it the operator wants a master, whose end would be that of the run; with it the job has "
    "succeeded once a worker has. Echelon reads none of the variables that it sets",
    "cleanPodPolicy": "what still runs when the job has ended is not needed",
    "restartPolicy": "codes from 128 are tried again (143: saved and left; 137: killed), 1 and 2 are not",
}


def render(job: Job) -> str:
    """Return the manifests of a PyTorchJob and of what stands around it."""
    return kubernetes.manifests(job, [_pytorchjob(job)], _NOTES)


def _pytorchjob(job: Job) -> dict[str, Any]:
    deploy = job.deploy
    container = {
        "name": "pytorch",  # the operator wants this name
        "image": job.image,
        "command": kubernetes.command(job),
        "resources": kubernetes.resources(job),
    }
    workers = {
        "replicas": deploy.max_nodes,
        "restartPolicy": "ExitCode",
        "template": kubernetes.node_pod(job, container),
    }
    elastic = {
        "rdzvBackend": "c10d",
        "minReplicas": deploy.min_nodes,
        "maxReplicas": deploy.max_nodes,
        "maxRestarts": deploy.max_restarts,
        "nProcPerNode": deploy.processes,
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "elasticPolicy": elastic,
            "runPolicy": {"cleanPodPolicy": "All", "backoffLimit": deploy.max_restarts},
            "pytorchReplicaSpecs": {"Worker": workers},
        },
    }
