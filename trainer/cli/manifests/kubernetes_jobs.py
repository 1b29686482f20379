"""Kubernetes manifests of a run: as an indexed Job, as a PyTorchJob, or as a TrainJob."""

from __future__ import annotations

from typing import Final

from . import kubernetes
from .deployed_run import DeployedRun
from .kubernetes import Object, make_object

_JOB_NOTES: Final = {
    "backoffLimitPerIndex": "a pod is given up after this many failures; maxFailedIndexes pods may be given up",
    "successPolicy": "the nodes end together, and one that starts later finds that the run is over",
    "podFailurePolicy": "the first rule that fits: evictions and preemption do not count, nor does 143, the exit code "
    "of a node that was told to leave and has saved a checkpoint; 2 is a wrong command or config, which no restart "
    "corrects",
}


def render_indexed_job(run: DeployedRun) -> str:
    """Return the manifests of a plain Kubernetes indexed Job: one pod per node, replaced after any eviction."""
    container = {
        "name": "node",
        "image": run.image,
        "command": kubernetes.make_node_command(run),
        "resources": kubernetes.make_node_resources(run),
    }
    pod = kubernetes.node_pod(run, container, restartPolicy="Never")
    numbers = {"completions": run.deploy.max_nodes, "parallelism": run.deploy.max_nodes}
    spec = {"completionMode": "Indexed", **numbers, **_job_rules(run), "template": pod}
    notes = {**_JOB_NOTES, "completions": "change both together and the run grows or shrinks: kubectl patch job"}
    return kubernetes.render_manifests(run, [make_object(run, "Job", {"spec": spec})], notes)


def render_pytorchjob(run: DeployedRun) -> str:
    """Return the manifests of a PyTorchJob for Kubeflow's training operator: workers only, with its elastic policy."""
    deploy = run.deploy
    container = {
        "name": "pytorch",  # the operator requires this name
        "image": run.image,
        "command": kubernetes.make_node_command(run),
        "resources": kubernetes.make_node_resources(run),
    }
    workers = {
        "replicas": deploy.max_nodes,
        "restartPolicy": "ExitCode",
        "template": kubernetes.node_pod(run, container),
    }
    elastic = {
        "rdzvBackend": "c10d",
        "minReplicas": deploy.min_nodes,
        "maxReplicas": deploy.max_nodes,
        "maxRestarts": deploy.max_restarts,
        "nProcPerNode": deploy.processes,
    }
    spec = {
        "elasticPolicy": elastic,
        "runPolicy": {"cleanPodPolicy": "All", "backoffLimit": deploy.max_restarts},
        "pytorchReplicaSpecs": {"Worker": workers},
    }
    notes = {
        "elasticPolicy": "without it the operator requires a master, whose end would end the run; with it the job has "
        "succeeded once a worker has. Echelon does not read the variables that it sets",
        "cleanPodPolicy": "pods that still run when the job has ended are not needed",
        "restartPolicy": "exit codes from 128 are retried (143: saved and left; 137: killed), 1 and 2 are not",
    }
    return kubernetes.render_manifests(run, [make_object(run, "PyTorchJob", {"spec": spec})], notes)


def render_trainjob(run: DeployedRun) -> str:
    """Return the manifests of a TrainJob for Kubeflow Trainer, and of its TrainingRuntime.

    The runtime describes a node. The TrainJob says what a node runs, and Trainer writes the number of nodes into the
    Job.
    """
    pod = kubernetes.node_pod(run, {"name": "node"}, restartPolicy="Never")
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"completionMode": "Indexed", **_job_rules(run), "template": pod},
    }
    runtime = {
        "mlPolicy": {"numNodes": run.deploy.max_nodes},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}},
    }
    name = f"{run.deploy.name}-runtime"
    job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {
            "image": run.image,
            "command": kubernetes.make_node_command(run),
            "numNodes": run.deploy.max_nodes,
            "resourcesPerNode": kubernetes.make_node_resources(run),
        },
    }
    objects = [
        make_object(run, "TrainingRuntime", {"spec": runtime}, "-runtime"),
        make_object(run, "TrainJob", {"spec": job}),
    ]
    notes = {
        **_JOB_NOTES,
        "mlPolicy": "no torch policy: it would set variables for torchrun, but Echelon has its own rendezvous",
        "trainer.kubeflow.org/trainjob-ancestor-step": "Trainer applies the TrainJob to the container named node of "
        "the job with this label",
    }
    return kubernetes.render_manifests(run, objects, notes)


def _job_rules(run: DeployedRun) -> Object:
    """Return the rules by which a Job's pods are replaced or given up, and the Job has succeeded."""
    return {
        "backoffLimitPerIndex": run.deploy.max_restarts,
        "maxFailedIndexes": run.deploy.max_nodes - run.deploy.min_nodes,
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [143]}},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
            ]
        },
    }
