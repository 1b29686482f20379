"""`echelon render` for two configs, byte for byte: a small one, whose files are examples, and a large one."""

import pytest
import yaml
from printed import CLUSTER, FILES, ROOT

from echelon.trainer.cli.main import main

EXAMPLE = ROOT / "deploy" / "digits.yaml"


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize(
    ("config", "folder"), [(EXAMPLE, EXAMPLE.parent), (CLUSTER, CLUSTER.with_suffix(""))], ids=["digits", "cluster"]
)
def test_a_config_is_rendered_as_in_its_golden_file(config, folder, target, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    path = str(config.relative_to(ROOT))
    assert main(["render", "--target", target, path]) == 0
    golden = folder / FILES[target]
    again = f"to write it again: echelon render --target {target} {path} --output {golden.relative_to(ROOT)}"
    assert capsys.readouterr().out == golden.read_text(), again


def test_a_folder_gets_a_file_of_the_targets_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for target, name in FILES.items():
        assert main(["render", "--target", target, str(CLUSTER), "--output", str(tmp_path)]) == 0
        assert (tmp_path / name).exists()


def test_the_config_inside_is_the_one_given_with_its_interpolations_left_to_the_run():
    manifest = next(yaml.safe_load_all((CLUSTER.with_suffix("") / "job.yaml").read_text()))
    inside, given = yaml.safe_load(manifest["data"]["config.yaml"]), yaml.safe_load(CLUSTER.read_text())
    assert inside == given
    assert inside["data"]["root"] == "${oc.env:DATA_ROOT}"
    compose = yaml.safe_load((CLUSTER.with_suffix("") / "compose.yaml").read_text())
    assert yaml.safe_load(compose["configs"]["config"]["content"].replace("$$", "$")) == given
