"""What `echelon render` prints is valid under the schemas that its consumers publish."""

import json
from importlib.resources import files

import jsonschema
import kubeflow.training.models as kubeflow_v1
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes.client import models as kubernetes_v1
from printed import CLUSTER, ON_KUBERNETES, ROOT, STORE, config, documents

from echelon.trainer.cli.render import render_target

VERSIONS = ("1.31", "1.37")  # the first that has all of it switched on, and the last whose schema there is
SPECIAL = {"PyTorchJob", "TrainJob", "TrainingRuntime"}
CONFIGS = [pytest.param(str(path), id=path.stem) for path in (ROOT / "deploy" / "digits.yaml", CLUSTER, STORE)]


@pytest.mark.parametrize("path", CONFIGS)
@pytest.mark.parametrize("target", ON_KUBERNETES)
def test_objects_of_kubernetes_itself_are_valid(target, path):
    objects = [one for kind, one in documents(target, path).items() if kind not in SPECIAL]
    assert len(objects) >= 5
    for version in VERSIONS:
        for one in objects:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("path", CONFIGS)
@pytest.mark.parametrize("target", ["pytorchjob", "trainjob"])
def test_pods_and_jobs_inside_the_objects_of_operators_are_valid(target, path):
    objects = documents(target, path)
    if target == "pytorchjob":
        template = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    else:
        (replicated,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        whole = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    for version in VERSIONS:
        kubernetes_validate.validate(whole, version, strict=True)


@pytest.mark.parametrize("path", CONFIGS)
def test_a_pytorchjob_has_the_fields_of_the_operators_own_client(path):
    job = documents("pytorchjob", path)["PyTorchJob"]
    assert unknown_of_client(job, "KubeflowOrgV1PyTorchJob") == []


@pytest.mark.parametrize("path", CONFIGS)
def test_a_trainjob_and_its_runtime_have_the_fields_of_the_trainers_own_models(path):
    objects = documents("trainjob", path)
    for kind, model in (("TrainJob", TrainerV1alpha1TrainJob), ("TrainingRuntime", TrainerV1alpha1TrainingRuntime)):
        # a model drops what it does not know, and refuses a value of another type
        assert model.from_dict(objects[kind]).to_dict() == objects[kind]


@pytest.mark.parametrize("path", CONFIGS)
def test_a_compose_file_is_valid_by_the_compose_specification(path):
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(yaml.safe_load(render_target("compose", path)), json.loads(schema.read_text()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "PyTorchJob", "spec": {"elasticPolicie": {}}}, "spec.elasticPolicie"),
        ({"kind": "PyTorchJob", "spec": {"runPolicy": {"backoffLimit": "3"}}}, "spec.runPolicy.backoffLimit"),
    ],
)
def test_the_walk_over_the_clients_models_finds_mistakes(wrong, message):
    assert unknown_of_client(wrong, "KubeflowOrgV1PyTorchJob") == [message]


def test_the_schemas_find_mistakes(tmp_path):
    path = config(tmp_path, {"image": "a", "nodes": 2})
    job = documents("indexed-job", path)["Job"]
    job["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


SIMPLE = {"str": str, "int": int, "bool": bool, "object": object, "datetime": str}


def unknown_of_client(value, kind, path=""):
    """Return the paths of a value that the models of a generated client do not know, or know as another type."""
    if kind.startswith("list["):
        return [found for item in value for found in unknown_of_client(item, kind[5:-1], path)]
    if kind.startswith("dict("):
        inner = kind[5:-1].partition(", ")[2]
        return [found for key, item in value.items() for found in unknown_of_client(item, inner, f"{path}.{key}")]
    if kind in SIMPLE:
        return [] if isinstance(value, SIMPLE[kind]) else [path]
    model = getattr(kubeflow_v1, kind, None) or getattr(kubernetes_v1, kind)
    names = {there: here for here, there in model.attribute_map.items()}
    found = []
    for key, item in value.items():
        place = f"{path}.{key}".lstrip(".")
        found += unknown_of_client(item, model.openapi_types[names[key]], place) if key in names else [place]
    return found
