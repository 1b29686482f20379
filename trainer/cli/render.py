"""``echelon render``: what a scheduler needs to run a config, as a script or manifests."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...strategies.errors import ConfigError, did_you_mean

_TARGETS: Final = {
    "slurm": "train.sbatch",
    "compose": "compose.yaml",
    "pytorchjob": "pytorchjob.yaml",
    "trainjob": "trainjob.yaml",
    "indexed-job": "job.yaml",
}
"""Each with the name of its file."""

_EPILOG: Final = """\
the section of the config, of which everything has a default but image, where containers are used:
  deploy:
    name: train          the run: the same name goes on from its newest checkpoint
    image: registry.example/train:1
    nodes: "1:4"         a number, or as few and as many as may take part
    gpus: 8              of a node, which starts one process for each
    cpus: 32
    memory: 256Gi
    runs: runs           a claim, volume or folder that all nodes share
  docs/deploy.md has them all, and what each target does with them.

examples:
  echelon render --target slurm config.yaml > train.sbatch && sbatch train.sbatch
  echelon render --target indexed-job config.yaml deploy.nodes=8 deploy.name=second | kubectl apply -f -
  echelon render --target compose config.yaml --output compose.yaml

exit codes:
  0 done   2 wrong command or config
"""


def main(words: Sequence[str]) -> int:
    """Print what was asked for, or write it to a file, and return the exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; see `echelon render --help`")
    try:
        text = render(options.target, options.config, [*options.overrides, *rest])
    except ConfigError as error:
        print(f"echelon: error: {error}", file=sys.stderr)
        return 2
    if options.output is None:
        print(text, end="")
        return 0
    file = options.output / _TARGETS[options.target] if options.output.is_dir() else options.output
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"--output {file} cannot be written ({error.strerror}); give a file in a folder that exists")
    return 0


def render(target: str, path: str, overrides: Sequence[str] = ()) -> str:
    """Return what a target needs to run a config.

    Raises:
        ConfigError: for a target that there is not, a config that cannot be read, and a section ``deploy`` that lacks
            something or says what cannot be.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from .config import read_config
    from .manifests.deploy import read_deploy
    from .manifests.job import Job

    config = read_config(path, overrides)
    try:
        section = config.get("deploy")
        given = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; give it a value in {path}.") from None
    deploy, text = read_deploy(given), OmegaConf.to_yaml(config)
    kept = [override for override in overrides if not override.startswith("deploy.")]
    module = importlib.import_module(f".manifests.{target.replace('-', '_')}", __package__)
    rendered: str = module.render(Job(deploy, text, path, kept))
    return rendered


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="echelon render",
        description="Print what a scheduler needs to run a config: a script or manifests.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", type=_target, required=True, metavar="TARGET", help=", ".join(_TARGETS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file, or a folder, instead of standard output")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`, with a section deploy")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    return parser


def _target(text: str) -> str:
    if text not in _TARGETS:
        raise argparse.ArgumentTypeError(f"there is no target {text!r}.{did_you_mean(text, _TARGETS)}")
    return text
