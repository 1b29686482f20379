"""A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), with the TrainingRuntime that it needs."""

from __future__ import annotations

from typing import Any, Final

from . import kubernetes
from .indexed_job import NODE_NOTES, node_job
from .job import Job

_NOTES: Final = {
    **NODE_NOTES,
    "mlPolicy": "no torch policy: it would set variables for torchrun, and Echelon has a rendezvous of its own",
    "trainer.kubeflow.org/trainjob-ancestor-step": "by which Trainer finds the job whose container, named node, gets "
    "what the TrainJob says",
}


def render(job: Job) -> str:
    """Return the manifests of a TrainJob, of its runtime, and of what stands around them."""
    return kubernetes.manifests(job, [_runtime(job), _trainjob(job)], _NOTES)


def _runtime(job: Job) -> dict[str, Any]:
    # how many nodes there are, Trainer writes into the Job; how a node looks is said here, what it does by the TrainJob
    rules = {name: value for name, value in node_job(job).items() if name not in ("completions", "parallelism")}
    pod = kubernetes.node_pod(job, {"name": "node"}, restartPolicy="Never")
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {**rules, "template": pod},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": kubernetes.metadata(job, "-runtime"),
        "spec": {
            "mlPolicy": {"numNodes": job.deploy.max_nodes},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}},
        },
    }


def _trainjob(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": f"{job.deploy.name}-runtime",
            },
            "trainer": {
                "image": job.image,
                "command": kubernetes.command(job),
                "numNodes": job.deploy.max_nodes,
                "resourcesPerNode": kubernetes.resources(job),
            },
        },
    }
