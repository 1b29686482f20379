"""Kubernetes objects that all kinds of jobs share: the pods of a run, and the objects around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .deployed_run import CONFIG, ENV, RUNS, DeployedRun
from .yaml_text import yaml_text

Object = dict[str, Any]

_API_VERSIONS: Final = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Job": "batch/v1",
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
}
_LOCKED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_LITTLE: Final = {"cpu": "250m", "memory": "1Gi"}
_NOTES: Final[Mapping[str, str]] = {
    "data.config.yaml": "the run itself, as `echelon fit` takes it",
    "unhealthyPodEvictionPolicy": "pods that are not ready do not train, and may always be drained",
    "minAvailable": "draining leaves this many nodes; the others save, end, and are replaced elsewhere",
    "policyTypes": "the rendezvous, gloo and NCCL, which listen on any port, need no password: only the pods of this "
    "run may connect to each other",
    "terminationGracePeriodSeconds": "from SIGTERM to SIGKILL: time to finish a step and to save a checkpoint",
    "automountServiceAccountToken": "the run does not call the Kubernetes API",
    "enableServiceLinks": "otherwise the variables of all services of the namespace are set",
    "shareProcessNamespace": "so that the command is not process 1, which ignores signals without a handler and has to "
    "reap orphans",
    "fsGroup": "the group that owns the volume of the runs",
    "startupProbe": "the node folder in shared memory exists once the agent runs. There is no liveness probe: the "
    "agent itself monitors the workers, and restarts them within seconds",
    "readOnlyRootFilesystem": "files are written only to /runs, /tmp and /dev/shm",
    "limits": "the same as the requests: a machine that is short of memory evicts such pods last",
    "strategy": "two stores at once would split the run",
    "emptyDir.medium": "shared memory, for snapshots and data loader workers (64 MiB without this); it counts as "
    "memory of the pod",
}
"""Comments for `yaml_text` on fields that may surprise a reader."""


def render_manifests(run: DeployedRun, jobs: Sequence[Object], notes: Mapping[str, str]) -> str:
    """Return the objects of a job as YAML, after those that every run has; `notes` are comments on them."""
    name = run.deploy.name
    heading = f"`kubectl apply -f` starts the run {name!r}, `kubectl delete -f` ends it after a checkpoint."
    objects = [make_object(run, "ConfigMap", {"data": {"config.yaml": run.text}}, "-config"), _network_policy(run)]
    if run.has_rendezvous:
        objects += [_disruption_budget(run), _rendezvous_service(run), _rendezvous_deployment(run)]
    return yaml_text([*objects, *jobs], heading, {**_NOTES, **notes})


def make_object(run: DeployedRun, kind: str, body: Object, suffix: str = "") -> Object:
    """Return an object of a kind, named after the run with a suffix."""
    namespace: Object = {} if run.deploy.namespace is None else {"namespace": run.deploy.namespace}
    metadata = {"name": f"{run.deploy.name}{suffix}", **namespace, "labels": make_labels(run)}
    return {"apiVersion": _API_VERSIONS[kind], "kind": kind, "metadata": metadata, **body}


def make_labels(run: DeployedRun, component: str | None = None) -> Object:
    """Return the labels of all objects of a run, or of one component."""
    shared = {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": run.deploy.name}
    return shared if component is None else {**shared, "app.kubernetes.io/component": component}


def make_node_command(run: DeployedRun) -> list[str]:
    """Return the command of a node."""
    return [_escape_variables(word) for word in run.node_command(f"{run.deploy.name}-rendezvous")]


def make_node_resources(run: DeployedRun) -> Object:
    """Return the requests and limits of a node."""
    deploy = run.deploy
    amounts = {"cpu": str(deploy.cpus), "memory": deploy.memory}
    if deploy.gpus:
        amounts[deploy.gpu_resource] = str(deploy.gpus)
    return {"requests": amounts, "limits": amounts}


def node_pod(run: DeployedRun, container: Mapping[str, object], **spec: object) -> Object:
    """Return the template of the pods that train.

    Args:
        container: the name and, unless the job gives them elsewhere, image, command and resources.
        spec: fields that the job adds to the pod.
    """
    volumes: dict[str, Object] = {
        "config": {"configMap": {"name": f"{run.deploy.name}-config"}},
        **({} if run.uses_store else {"runs": {"persistentVolumeClaim": {"claimName": run.deploy.runs}}}),
        "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": run.deploy.shared_memory}},
        "tmp": {"emptyDir": {}},
    }
    places = {"config": CONFIG.rpartition("/")[0], "runs": RUNS, "shared-memory": "/dev/shm", "tmp": "/tmp"}
    secret = {} if run.deploy.secret is None else {"envFrom": [{"secretRef": {"name": run.deploy.secret}}]}
    account = run.deploy.service_account
    env = {**ENV, **run.deploy.env}
    started = ["sh", "-c", "ls -d /dev/shm/echelon-node-*"]
    whole = {
        **container,
        "env": [{"name": name, "value": _escape_variables(value)} for name, value in env.items()],
        **secret,
        "startupProbe": {"exec": {"command": started}, "periodSeconds": 5, "failureThreshold": 360},
        "securityContext": _LOCKED,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items() if name in volumes],
    }
    return {
        "metadata": {"labels": make_labels(run, "node"), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            **spec,
            "terminationGracePeriodSeconds": run.deploy.grace,
            **({} if account is None else {"serviceAccountName": account}),
            **_pod_settings(run),
            "containers": [whole],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        },
    }


def _escape_variables(text: str) -> str:
    """Return a text escaped so that Kubernetes substitutes no variables."""
    return text.replace("$(", "$$(")


def _pod_settings(run: DeployedRun) -> Object:
    user = run.deploy.user
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


def _network_policy(run: DeployedRun) -> Object:
    pods = {"podSelector": {"matchLabels": make_labels(run)}}
    return make_object(
        run, "NetworkPolicy", {"spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}}
    )


def _disruption_budget(run: DeployedRun) -> Object:
    spec = {
        # an absolute number, since Kubernetes does not accept a percentage for the pods of a Job
        "minAvailable": min(run.deploy.min_nodes, run.deploy.max_nodes - 1),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": make_labels(run, "node")},
    }
    return make_object(run, "PodDisruptionBudget", {"spec": spec})


def _rendezvous_service(run: DeployedRun) -> Object:
    spec = {"selector": make_labels(run, "rendezvous"), "ports": [{"name": "store", "port": run.deploy.port}]}
    return make_object(run, "Service", {"spec": spec}, "-rendezvous")


def _rendezvous_deployment(run: DeployedRun) -> Object:
    probe = {"tcpSocket": {"port": "store"}, "periodSeconds": 5}
    container = {
        "name": "rendezvous",
        "image": run.image,
        "command": run.rendezvous_command("0.0.0.0"),
        "env": [{"name": name, "value": value} for name, value in {**ENV, "OMP_NUM_THREADS": "1"}.items()],
        "ports": [{"name": "store", "containerPort": run.deploy.port}],
        "resources": {"requests": _LITTLE, "limits": _LITTLE},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "initialDelaySeconds": 60},
        "securityContext": _LOCKED,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": make_labels(run, "rendezvous")},
        "template": {
            "metadata": {"labels": make_labels(run, "rendezvous")},
            "spec": {**_pod_settings(run), "containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]},
        },
    }
    return make_object(run, "Deployment", {"spec": spec}, "-rendezvous")
