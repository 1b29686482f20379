"""The command ``echelon render``: the script or the manifests with which a scheduler runs a config."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...common.errors import ConfigError, did_you_mean
from ...common.local_path import local_path
from ...common.storage import is_url
from .config_file import read_config
from .manifests import compose, kubernetes_jobs, slurm
from .manifests.deploy import read_deploy
from .manifests.deployed_run import DeployedRun


@dataclass(frozen=True)
class Target:
    """A scheduler that a config can be rendered for."""

    file_name: str
    render: Callable[[DeployedRun], str]


_TARGETS: Final = {
    "slurm": Target("train.sbatch", slurm.render_script),
    "compose": Target("compose.yaml", compose.render_compose),
    "pytorchjob": Target("pytorchjob.yaml", kubernetes_jobs.render_pytorchjob),
    "trainjob": Target("trainjob.yaml", kubernetes_jobs.render_trainjob),
    "indexed-job": Target("job.yaml", kubernetes_jobs.render_indexed_job),
}

_EPILOG: Final = """\
the section of the config; everything has a default, except image for targets that use containers:
  deploy:
    name: train          the run; the same name resumes from its newest checkpoint
    image: registry.example/train:1
    nodes: "1:4"         a number, or MIN:MAX
    gpus: 8              per node, with one process each
    cpus: 32
    memory: 256Gi
    runs: runs           a claim, volume or folder that all nodes share, or a URL such as s3://bucket/runs
  docs/deploy.md lists all keys, and what each target does with them.

examples:
  echelon render --target slurm config.yaml > train.sbatch && sbatch train.sbatch
  echelon render --target indexed-job config.yaml deploy.nodes=8 deploy.name=second | kubectl apply -f -
  echelon render --target compose config.yaml --output compose.yaml

exit codes:
  0 done   2 wrong command or config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, and the config with its overrides."""
    parser.epilog = _EPILOG
    parser.add_argument("--target", type=_parse_target, required=True, metavar="TARGET", help=", ".join(_TARGETS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file, or a folder, instead of standard output")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`, with a section deploy")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")


def run(options: argparse.Namespace) -> int:
    """Print the script or manifests of the target, or write them to a file; return 0."""
    text = render_target(options.target, options.config, options.overrides)
    if options.output is None:
        print(text, end="")
        return 0
    output = local_path("--output", options.output)
    file = output / _TARGETS[options.target].file_name if output.is_dir() else output
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"--output {file} cannot be written ({error.strerror}); give a file in a folder that exists"
        raise argparse.ArgumentError(None, reason) from None
    return 0


def render_target(target: str, path: str, overrides: Sequence[str] = ()) -> str:
    """Return the script or manifests with which a target runs a config.

    Raises:
        ConfigError: for a config that cannot be read, or an incomplete or invalid section ``deploy``.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = read_config(path, overrides)
    try:
        section = config.get("deploy")
        given = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; give it a value in {path}.") from None
    try:
        text = OmegaConf.to_yaml(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be written as YAML ({error}); correct the file.") from None
    root = OmegaConf.select(config, "trainer.default_root_dir", throw_on_resolution_failure=False)
    if isinstance(given, dict) and "runs" not in given and is_url(root):
        given["runs"] = str(root)
    kept = [override for override in overrides if not override.startswith("deploy.")]
    return _TARGETS[target].render(DeployedRun(read_deploy(given), text, path, kept))


def _parse_target(text: str) -> str:
    if text not in _TARGETS:
        raise argparse.ArgumentTypeError(f"there is no target {text!r}.{did_you_mean(text, _TARGETS)}")
    return text
