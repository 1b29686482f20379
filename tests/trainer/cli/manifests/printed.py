"""Captures what `echelon render` prints, for its tests."""

from pathlib import Path

import yaml

from echelon.trainer.cli.render import render_target

ROOT = Path(__file__).parents[4]
CLUSTER = ROOT / "tests" / "trainer" / "cli" / "manifests" / "golden" / "cluster.yaml"
STORE = Path(__file__).with_name("store.yaml")
FILES = {
    "slurm": "train.sbatch",
    "compose": "compose.yaml",
    "pytorchjob": "pytorchjob.yaml",
    "trainjob": "trainjob.yaml",
    "indexed-job": "job.yaml",
}
ON_KUBERNETES = ("indexed-job", "pytorchjob", "trainjob")


def config(folder, deploy):
    """Write a config of this section, and return its path."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"module": {"_target_": "net.Net"}, "deploy": deploy}))
    return str(path)


def documents(target, path, *overrides):
    """Return what is printed for a target, read as YAML: the objects by their kinds."""
    return {one["kind"]: one for one in yaml.safe_load_all(render_target(target, path, overrides))}
