"""The section ``deploy`` of a config: its defaults, what it refuses, and the effect of its values."""

import argparse
import re

import pytest
import yaml
from printed import ON_KUBERNETES, STORE, config, documents

from echelon.common.errors import ConfigError
from echelon.trainer.cli import launch
from echelon.trainer.cli.config_file import load_config, read_config
from echelon.trainer.cli.main import main
from echelon.trainer.cli.render import render_target


def container(objects):
    """Return the container of a node and its pod, and what the target says of them elsewhere."""
    if "TrainJob" in objects:
        (replicated,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        pod, elsewhere = replicated["template"]["spec"]["template"]["spec"], objects["TrainJob"]["spec"]["trainer"]
    elif "PyTorchJob" in objects:
        pod, elsewhere = objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"], {}
    else:
        pod, elsewhere = objects["Job"]["spec"]["template"]["spec"], {}
    return pod["containers"][0] | elsewhere, pod


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        ({"imag": "a"}, "deploy.imag='a' is not a key of deploy. Did you mean 'image'?"),
        ({"cpus": "four"}, "deploy.cpus='four' has the wrong type str; it must be int."),
        ({"setup": [1]}, "deploy.setup=[1] has the wrong type list; it must be list"),
        ({"nodes": "1:"}, "deploy.nodes must be a number from 1 or a range such as '1:4', got '1:'."),
        ({"nodes": "4:1"}, "'1:4', got '4:1'."),
        ({"nodes": 0}, "'1:4', got 0."),
        ({"nodes": "two"}, "'1:4', got 'two'."),
        ({"gpus": -1}, "deploy.gpus must be 0 or more, got -1."),
        ({"user": 0}, "deploy.user must be 1 or more, got 0."),
        ({"memory": "16"}, "deploy.memory='16' is not a size; give a number with Mi, Gi or Ti, such as '16Gi'."),
        ({"memory": "1Gi"}, "deploy.shared_memory='2Gi' must be less than deploy.memory='1Gi', of which it is a part."),
        ({"name": "My_run"}, "deploy.name='My_run' is not a valid name; give up to 40 lowercase letters, digits and"),
        ({"env": {"A": 1}}, "deploy.env.A=1 is not a variable; give a name and a quoted string."),
        ({"time": "24h\n#SBATCH"}, "deploy.time='24h\\n#SBATCH'"),
    ],
)
def test_a_wrong_value_is_named_with_what_to_do(deploy, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        render_target("slurm", config(tmp_path, deploy))


def test_a_section_that_holds_no_keys_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="deploy=3 must hold keys and values; write, for example, deploy"):
        render_target("slurm", config(tmp_path, 3))


@pytest.mark.parametrize("target", ["compose", *ON_KUBERNETES])
def test_where_containers_are_used_an_image_is_wanted(target, tmp_path, capsys):
    path = config(tmp_path, {})
    assert main(["render", "--target", target, path]) == 2
    assert f"deploy.image=None in {path}, but this target runs containers; give deploy.image" in capsys.readouterr().err


def test_a_target_that_there_is_not_is_answered_with_the_nearest(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["render", "--target", "slrum", config(tmp_path, {})])
    assert caught.value.code == 2
    assert "there is no target 'slrum'. Did you mean 'slurm'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["render", "--target", "slurm", "--ouput", "a", "b.yaml"])
    assert "unknown option '--ouput'; see `echelon render --help`" in capsys.readouterr().err


def test_a_place_where_nothing_can_be_written_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["render", "--target", "slurm", "--output", str(tmp_path / "a" / "b"), config(tmp_path, {})])
    assert "cannot be written (No such file or directory); give a file in a folder that exists" in (
        capsys.readouterr().err
    )


def test_a_misspelt_section_is_found(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("deply: {nodes: 3}")
    with pytest.raises(ConfigError, match=r"deply=.* is not a key of a config. Did you mean 'deploy'\?"):
        render_target("slurm", str(path))


def test_what_yaml_would_count_by_sixties_is_text_or_refused(tmp_path):
    path = config(tmp_path, {})
    assert "--nodes=1-4\n" in render_target("slurm", path, ["deploy.nodes=1:4"])
    assert "--time=12:30:00\n" in render_target("slurm", path, ["deploy.time=12:30:00"])
    assert load_config(path, ["deploy.nodes=2:3"]).values["deploy"] == {"nodes": "2:3"}
    (tmp_path / "config.yaml").write_text("# two lines\ndeploy:\n  nodes: 1:4\n")
    with pytest.raises(ConfigError, match=r'line 3: YAML reads 1:4 as a number; write "1:4"'):
        read_config(path)


def test_the_time_of_slurm_may_be_minutes(tmp_path):
    assert "--time=90\n" in render_target("slurm", config(tmp_path, {}), ["deploy.time=90"])


@pytest.mark.parametrize("nodes", [1, 3, "2:5"])
def test_the_command_of_a_node_is_one_that_the_launcher_takes(nodes, tmp_path):
    path = config(tmp_path, {"image": "a", "nodes": nodes, "nproc": 2, "max_restarts": 7})
    echelon, command, *words = container(documents("indexed-job", path))[0]["command"]
    assert (echelon, command) == ("echelon", "launch")
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    options = parser.parse_args(words)
    least, _, most = str(nodes).partition(":")
    assert options.nodes == (int(least), int(most or least))
    assert (options.nproc, options.max_restarts, options.module, options.program) == ("2", 7, True, "echelon")
    assert options.arguments[:2] == ["fit", "/etc/echelon/config.yaml"]


def test_the_defaults_of_a_node_follow_each_other(tmp_path):
    path = config(tmp_path, {"image": "a"})
    for overrides, processes in (([], "1"), (["deploy.gpus=8"], "8"), (["deploy.gpus=8", "deploy.nproc=2"], "2")):
        words = container(documents("indexed-job", path, *overrides))[0]["command"]
        assert words[words.index("--nproc") + 1] == processes


@pytest.mark.parametrize("target", ON_KUBERNETES)
def test_a_pod_is_as_the_section_says(target, tmp_path):
    deploy = {"image": "a", "nodes": "2:5", "gpus": 4, "cpus": 9, "memory": "64Gi", "shared_memory": "8Gi"}
    objects = documents(target, config(tmp_path, {**deploy, "grace": 77, "user": 1234, "env": {"A": "$(B)"}}))
    node, pod = container(objects)
    assert node["image"] == "a"
    assert " ".join(node["command"]).startswith("echelon launch --nodes 2:5 --rdzv train-rendezvous:29400 ")
    amounts = {"cpu": "9", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert (node.get("resourcesPerNode") or node["resources"]) == {"requests": amounts, "limits": amounts}
    assert pod["terminationGracePeriodSeconds"] == 77
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 1234
    assert node["securityContext"]["readOnlyRootFilesystem"]
    assert {"name": "A", "value": "$$(B)"} in node["env"]
    mounted = {mount["mountPath"]: mount["name"] for mount in node["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] == 2
    selected = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    assert selected <= objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("target", ON_KUBERNETES)
def test_nodes_that_keep_their_runs_in_a_store_share_no_volume(target):
    objects = documents(target, str(STORE))
    node, pod = container(objects)
    assert "trainer.default_root_dir=s3://bucket/runs/digits" in node["command"]
    assert "persistentVolumeClaim" not in str(objects)
    assert {mount["mountPath"] for mount in node["volumeMounts"]} == {"/etc/echelon", "/dev/shm", "/tmp"}
    assert node["envFrom"] == [{"secretRef": {"name": "bucket-credentials"}}]
    assert pod["serviceAccountName"] == "trainer"


def test_a_store_is_named_by_the_section_or_by_the_config(tmp_path):
    script = render_target("slurm", str(STORE), ["deploy.runs=gs://other/runs"])
    assert "trainer.default_root_dir=gs://other/runs/digits" in script
    file = yaml.safe_load(render_target("compose", str(STORE)))
    assert "volumes" not in file and "volumes" not in file["services"]["node"]
    assert file["services"]["node"]["env_file"] == ["bucket-credentials"]
    with pytest.raises(ConfigError, match=r"deploy\.runs='s4://bucket/runs' has the scheme 's4'"):
        render_target("slurm", config(tmp_path, {"runs": "s4://bucket/runs"}))


@pytest.mark.parametrize("target", ON_KUBERNETES)
def test_one_node_meets_nobody(target, tmp_path):
    objects = documents(target, config(tmp_path, {"image": "a"}))
    assert not {"Deployment", "Service", "PodDisruptionBudget"} & set(objects)
    assert "--rdzv" not in container(objects)[0]["command"]


def test_of_a_fixed_number_of_nodes_a_drain_may_take_one(tmp_path):
    objects = documents("indexed-job", config(tmp_path, {"image": "a", "nodes": 4}))
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] == 3
    assert objects["Job"]["spec"]["maxFailedIndexes"] == 0


def test_a_program_of_ones_own_runs_in_place_of_the_config(tmp_path):
    deploy = {"image": "a", "program": ["train.py", "--lr", "$(0.1)"]}
    command = container(documents("indexed-job", config(tmp_path, deploy)))[0]["command"]
    assert command[-3:] == ["train.py", "--lr", "$$(0.1)"]
    assert render_target("slurm", config(tmp_path, deploy)).count("train.py --lr '$(0.1)' &\n") == 1
