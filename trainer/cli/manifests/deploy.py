"""Deploy: the section ``deploy`` of a config, which says where a run is to take place and with what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, get_type_hints

from ....strategies.elastic import parse_nodes
from ....strategies.errors import ConfigError, did_you_mean
from ...session.settings import describe, fits

_UNITS: Final = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_AT_LEAST: Final = {"gpus": 0, "nproc": 1, "cpus": 1, "max_restarts": 0, "grace": 10, "port": 1024, "user": 1}


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Where a run takes place, and with what; all of it can be left out but ``image``, where containers are used.

    Raises:
        ConfigError: for a value that cannot be.
    """

    # --- of every target ---
    name: str = "train"
    """Names the run: what is rendered with the same name again goes on from its newest checkpoint."""
    nodes: int | str = 1
    """A number, or ``"MIN:MAX"``: the run begins with MIN nodes, and grows and shrinks between them."""
    nproc: int | None = None
    """Processes of a node; one for each GPU, or one, if None."""
    gpus: int = 0
    """GPUs of a node."""
    cpus: int = 4
    """Cores of a node."""
    memory: str = "16Gi"
    """Of a node, the shared memory included."""
    max_restarts: int = 10
    """How often a node starts its processes again after failures."""
    grace: int = 60
    """Seconds between SIGTERM and SIGKILL, in which a step is finished and a checkpoint saved."""
    port: int = 29400
    """Where nodes meet."""
    runs: str = "runs"
    """Where runs are kept: the claim of a volume, or for SLURM a folder, that all nodes share."""
    env: Mapping[str, str] = field(default_factory=dict)
    program: list[str] | None = None
    """What ``echelon launch`` runs: a script or ``-m module``, and its arguments; this config if None."""

    # --- containers ---
    image: str | None = None
    """With Echelon and the code of the run, which is found in its working directory."""
    shared_memory: str = "2Gi"
    """For snapshots of the state and for the workers of data loaders."""
    user: int = 1000
    """The number of the user, who is not root."""

    # --- Kubernetes ---
    namespace: str | None = None
    gpu_resource: str = "nvidia.com/gpu"

    # --- SLURM ---
    partition: str | None = None
    account: str | None = None
    time: int | str = "24:00:00"
    """How long one allocation lasts, or its minutes; after it the job is queued again, and goes on."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that make ``echelon`` a command, such as ``source .venv/bin/activate``."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"deploy.name={self.name!r} is no name of a job; give up to 40 small letters, digits and hyphens."
            )
        try:
            parse_nodes(self.nodes)
        except ValueError:
            raise ConfigError(
                f"deploy.nodes={self.nodes!r} is not possible; give a number from 1, or such as '1:4'."
            ) from None
        for name, smallest in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"deploy.{name}={value} is not possible; give {smallest} or more.")
        if size(self.shared_memory, "shared_memory") >= size(self.memory, "memory"):
            raise ConfigError(
                f"deploy.shared_memory={self.shared_memory!r} is taken from deploy.memory={self.memory!r}; give less."
            )
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, str) and not re.fullmatch(r"[\w./:@ -]+", value):
                raise ConfigError(
                    f"deploy.{one.name}={value!r} is no word for schedulers; give letters, digits and ./:@-_ only."
                )
        for name, value in self.env.items():
            if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise ConfigError(f"deploy.env.{name}={value!r} is no variable; give a name and a text in quotes.")

    @property
    def min_nodes(self) -> int:
        """The number of nodes with which the run begins."""
        return parse_nodes(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """The number of nodes that it can use."""
        return parse_nodes(self.nodes)[1]

    @property
    def processes(self) -> int:
        """The number of processes of each node."""
        return self.nproc or self.gpus or 1


def read_deploy(given: object) -> Deploy:
    """Check the section of a config, and return it with its defaults.

    Raises:
        ConfigError: for an unknown key, and a value of the wrong type or one that cannot be.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"deploy={given!r} holds no keys; write such as deploy: {{image: ..., nodes: '1:4'}}.")
    known = [one.name for one in fields(Deploy)]
    hints = get_type_hints(Deploy)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"deploy.{name}={value!r} is no key of deploy.{did_you_mean(str(name), known)}")
        hint = hints[name]
        if not _fits(value, hint):
            raise ConfigError(
                f"deploy.{name}={value!r} has the wrong type {type(value).__name__}; it must be {describe(hint)}."
            )
    return Deploy(**given)


def _fits(value: object, hint: Any) -> bool:
    if not fits(value, hint):
        return False
    return not isinstance(value, list) or all(isinstance(word, str) for word in value)


def size(text: str, name: str) -> int:
    """Return the bytes of a size such as ``16Gi``.

    Raises:
        ConfigError: if it is none; `name` is the key that it stands at.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,9})(Mi|Gi|Ti)", text)
    if found is None:
        raise ConfigError(f"deploy.{name}={text!r} is no size; give a number with Mi, Gi or Ti, such as '16Gi'.")
    return int(found[1]) * _UNITS[found[2]]
