"""Job: what is to be rendered, and the command lines in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....strategies.errors import ConfigError
from .deploy import Deploy

CONFIG: Final = "/etc/echelon/config.yaml"
"""Where a container finds the config."""
RUNS: Final = "/runs"
"""Where a container finds the volume of the runs."""
ENV: Final[Mapping[str, str]] = {"HOME": "/tmp", "USER": "echelon", "PYTHONUNBUFFERED": "1"}
"""Variables of all containers, whose user may have neither home nor name in the image."""


@dataclass(frozen=True)
class Job:
    """A config and where it came from."""

    deploy: Deploy
    text: str
    """The config as YAML, with its overrides applied and its interpolations left as they are."""
    path: str
    overrides: Sequence[str]

    @property
    def image(self) -> str:
        """The image of the containers.

        Raises:
            ConfigError: if none is given.
        """
        if self.deploy.image is None:
            raise ConfigError(
                f"deploy.image={self.deploy.image} in {self.path}, but this target runs containers; "
                "give deploy.image=registry.example/name:tag, which holds Echelon and your code (see docs/deploy.md)."
            )
        return self.deploy.image

    @property
    def meets(self) -> bool:
        """Whether there is more than one node, so that they have to meet."""
        return self.deploy.max_nodes > 1

    @property
    def nodes(self) -> str:
        """The nodes, as ``echelon launch`` takes them."""
        least, most = self.deploy.min_nodes, self.deploy.max_nodes
        return str(most) if least == most else f"{least}:{most}"

    def in_container(self, host: str) -> list[str]:
        """Return the words of the command of a node; the nodes meet at `host`."""
        deploy = self.deploy
        meeting = ["--rdzv", f"{host}:{deploy.port}", "--run-id", deploy.name] if self.meets else []
        return ["echelon", "launch", "--nodes", self.nodes, *meeting, *self.processes, *self.program(CONFIG, (), RUNS)]

    @property
    def processes(self) -> list[str]:
        """The options of ``echelon launch`` that say what it starts on a node, and how often."""
        return ["--nproc", str(self.deploy.processes), "--max-restarts", str(self.deploy.max_restarts)]

    def program(self, config: str, overrides: Sequence[str], runs: str) -> list[str]:
        """Return what is launched: the program of the config, or this config itself, from its newest checkpoint."""
        if self.deploy.program is not None:
            return self.deploy.program
        keeping = [f"trainer.default_root_dir={runs}/{self.deploy.name}", "ckpt_path=last"]
        return ["-m", "echelon", "fit", config, *overrides, *keeping]

    def rendezvous(self, host: str) -> list[str]:
        """Return the words of the command that keeps the store in which the nodes meet."""
        return ["echelon", "rendezvous", "--listen", f"{host}:{self.deploy.port}"]


def shell(words: Sequence[str]) -> str:
    """Return words as a shell reads them."""
    return " ".join(map(shlex.quote, words))
