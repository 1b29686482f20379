"""Deploy: the section ``deploy`` of a config, with the resources of a run and its scheduler's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, get_type_hints

from ....common.errors import ConfigError, did_you_mean
from ....common.storage import any_path, is_url
from ....strategies.elastic import parse_nodes
from ...session.setting_types import fits_annotation, name_type

_UNITS: Final = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_AT_LEAST: Final = {"gpus": 0, "nproc": 1, "cpus": 1, "max_restarts": 0, "grace": 10, "port": 1024, "user": 1}


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """The resources of a run; every field has a default, except ``image`` for targets that use containers.

    Raises:
        ConfigError: for an invalid value.
    """

    # --- all targets ---
    name: str = "train"
    """The name of the run: if rendered again with the same name, it resumes from its newest checkpoint."""
    nodes: int | str = 1
    """A number, or ``"MIN:MAX"``: the run begins with MIN nodes, and grows and shrinks between them."""
    nproc: int | None = None
    """Processes per node; None: one per GPU, or one without GPUs."""
    gpus: int = 0
    """GPUs per node."""
    cpus: int = 4
    """Cores per node."""
    memory: str = "16Gi"
    """Memory per node, including shared memory."""
    max_restarts: int = 10
    """How often a node restarts its processes after failures."""
    grace: int = 60
    """Seconds between SIGTERM and SIGKILL, in which a step is finished and a checkpoint saved."""
    port: int = 29400
    """The port of the rendezvous."""
    runs: str = "runs"
    """The storage of the runs, shared by all nodes: the claim of a volume, a folder (SLURM), or a URL of a store.

    By default it is ``trainer.default_root_dir`` of the config, if that is a URL.
    """
    secret: str | None = None
    """The credentials of a store: the name of a Secret (Kubernetes), or a file of variables (Compose)."""
    env: Mapping[str, str] = field(default_factory=dict)
    program: list[str] | None = None
    """The program to launch: a script or ``-m module``, and its arguments; None: `echelon fit` with this config."""

    # --- containers ---
    image: str | None = None
    """An image with Echelon, and the code of the run in its working directory."""
    shared_memory: str = "2Gi"
    """Shared memory, for snapshots of the state and workers of data loaders."""
    user: int = 1000
    """The id of the user; not 0."""

    # --- Kubernetes ---
    namespace: str | None = None
    service_account: str | None = None
    """The service account of the nodes, to which the cloud may have given rights on a bucket."""
    gpu_resource: str = "nvidia.com/gpu"

    # --- SLURM ---
    partition: str | None = None
    account: str | None = None
    time: int | str = "24:00:00"
    """The time limit of an allocation, as text or in minutes; then the job is requeued, and resumes."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that make ``echelon`` available, such as ``source .venv/bin/activate``."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"deploy.name={self.name!r} is not a valid name; give up to 40 lowercase letters, digits and hyphens."
            )
        try:
            parse_nodes(self.nodes)
        except ValueError:
            raise ConfigError(
                f"deploy.nodes must be a number from 1 or a range such as '1:4', got {self.nodes!r}."
            ) from None
        for name, smallest in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"deploy.{name} must be {smallest} or more, got {value}.")
        if parse_size(self.shared_memory, "shared_memory") >= parse_size(self.memory, "memory"):
            raise ConfigError(
                f"deploy.shared_memory={self.shared_memory!r} must be less than deploy.memory={self.memory!r}, of "
                "which it is a part."
            )
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, str) and not re.fullmatch(r"[\w./:@ -]+", value):
                raise ConfigError(
                    f"deploy.{setting.name}={value!r} is not safe in a script; give letters, digits and ./:@-_ only."
                )
        for name, value in self.env.items():
            if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise ConfigError(f"deploy.env.{name}={value!r} is not a variable; give a name and a quoted string.")

        if is_url(self.runs):
            any_path("deploy.runs", self.runs)

    @property
    def min_nodes(self) -> int:
        """The number of nodes that the run begins with."""
        return parse_nodes(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """The number of nodes that the run can use."""
        return parse_nodes(self.nodes)[1]

    @property
    def processes(self) -> int:
        """The number of processes per node."""
        return self.nproc or self.gpus or 1


def read_deploy(given: object) -> Deploy:
    """Check the section of a config, and return it with its defaults.

    Raises:
        ConfigError: for an unknown key, or a value that is invalid or of the wrong type.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"deploy={given!r} must hold keys and values; write, for example, deploy: {{image: ..., nodes: '1:4'}}."
        )
    known = [setting.name for setting in fields(Deploy)]
    hints = get_type_hints(Deploy)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"deploy.{name}={value!r} is not a key of deploy.{did_you_mean(str(name), known)}")
        hint = hints[name]
        if not _fits_hint(value, hint):
            raise ConfigError(
                f"deploy.{name}={value!r} has the wrong type {type(value).__name__}; it must be {name_type(hint)}."
            )
    return Deploy(**given)


def _fits_hint(value: object, hint: object) -> bool:
    if not fits_annotation(value, hint):
        return False
    return not isinstance(value, list) or all(isinstance(word, str) for word in value)


def parse_size(text: str, name: str) -> int:
    """Return a size such as ``16Gi`` in bytes.

    Raises:
        ConfigError: for any other text; `name` is the key of the size.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,9})(Mi|Gi|Ti)", text)
    if match is None:
        raise ConfigError(f"deploy.{name}={text!r} is not a size; give a number with Mi, Gi or Ti, such as '16Gi'.")
    return int(match[1]) * _UNITS[match[2]]
