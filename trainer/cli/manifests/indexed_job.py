"""An indexed Job of plain Kubernetes: one pod a node, made anew after evictions without an end."""

from __future__ import annotations

from typing import Any, Final

from . import kubernetes
from .job import Job

NODE_NOTES: Final = {
    "backoffLimitPerIndex": "failures of a pod after which it is given up, of which so many may be",
    "successPolicy": "the nodes end together, and one that comes later finds the run over",
    "podFailurePolicy": "the first rule that fits: evictions and preemption count for nothing, nor does 143, by which "
    "a node says that it was told to leave and has saved; 2 is a wrong command or config, which no restart puts right",
}
"""On what `node_job` returns."""

_NOTES: Final = {
    **NODE_NOTES,
    "completions": "change both together and the run grows or shrinks: kubectl patch job",
}


def render(job: Job) -> str:
    """Return the manifests of a Job and of what stands around it."""
    return kubernetes.manifests(job, [_job(job)], _NOTES)


def node_job(job: Job) -> dict[str, Any]:
    """Return how the pods of a Job are made anew, when they are given up, and when the Job has succeeded."""
    most = job.deploy.max_nodes
    return {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        "backoffLimitPerIndex": job.deploy.max_restarts,
        "maxFailedIndexes": most - job.deploy.min_nodes,
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [143]}},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
            ]
        },
    }


def _job(job: Job) -> dict[str, Any]:
    container = {
        "name": "node",
        "image": job.image,
        "command": kubernetes.command(job),
        "resources": kubernetes.resources(job),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": kubernetes.metadata(job),
        "spec": {**node_job(job), "template": kubernetes.node_pod(job, container, restartPolicy="Never")},
    }
