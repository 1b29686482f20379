"""DeployedRun: a config to deploy, and the command lines that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....common.errors import ConfigError
from ....common.storage import is_url
from .deploy import Deploy

CONFIG: Final = "/etc/echelon/config.yaml"
"""The path of the config in a container."""
RUNS: Final = "/runs"
"""The path of the volume for runs in a container."""
ENV: Final[Mapping[str, str]] = {"HOME": "/tmp", "USER": "echelon", "PYTHONUNBUFFERED": "1"}
"""Environment variables of every container: its user may have neither a home nor a name in the image."""


@dataclass(frozen=True)
class DeployedRun:
    """A config to be run by a scheduler."""

    deploy: Deploy
    text: str
    """The config as YAML, with its overrides applied and its interpolations unresolved."""
    path: str
    overrides: Sequence[str]

    @property
    def image(self) -> str:
        """The image of the containers.

        Raises:
            ConfigError: if the config does not name one.
        """
        if self.deploy.image is None:
            raise ConfigError(
                f"deploy.image={self.deploy.image} in {self.path}, but this target runs containers; give "
                "deploy.image=registry.example/name:tag, which contains Echelon and your code (see docs/deploy.md)."
            )
        return self.deploy.image

    @property
    def has_rendezvous(self) -> bool:
        """Whether there are several nodes, which must find each other."""
        return self.deploy.max_nodes > 1

    @property
    def uses_store(self) -> bool:
        """Whether runs are kept in an object store: nodes then share no volume."""
        return is_url(self.deploy.runs)

    @property
    def nodes(self) -> str:
        """The nodes, in the form that ``echelon launch`` accepts."""
        least, most = self.deploy.min_nodes, self.deploy.max_nodes
        return str(most) if least == most else f"{least}:{most}"

    def node_command(self, host: str) -> list[str]:
        """Return the command of a node in a container; the rendezvous is at `host`."""
        deploy = self.deploy
        rendezvous = ["--rdzv", f"{host}:{deploy.port}", "--run-id", deploy.name] if self.has_rendezvous else []
        options = ["--nodes", self.nodes, *rendezvous, *self.process_options]
        return ["echelon", "launch", *options, *self.program(CONFIG, (), RUNS)]

    @property
    def process_options(self) -> list[str]:
        """The options of ``echelon launch`` for the processes of a node and their restarts."""
        return ["--nproc", str(self.deploy.processes), "--max-restarts", str(self.deploy.max_restarts)]

    def program(self, config: str, overrides: Sequence[str], runs: str) -> list[str]:
        """Return the program to launch: the one in the config, or `echelon fit` from the newest checkpoint."""
        if self.deploy.program is not None:
            return self.deploy.program
        runs = self.deploy.runs.rstrip("/") if self.uses_store else runs
        keeping = [f"trainer.default_root_dir={runs}/{self.deploy.name}", "ckpt_path=last"]
        return ["-m", "echelon", "fit", config, *overrides, *keeping]

    def rendezvous_command(self, host: str) -> list[str]:
        """Return the command of the rendezvous."""
        return ["echelon", "rendezvous", "--listen", f"{host}:{self.deploy.port}"]
