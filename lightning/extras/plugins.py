"""Plugins of Lightning: launchers and precisions, which a trainer takes as what Echelon has for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal

from torch import nn

from ...common.errors import ConfigError
from ...strategies.cluster.environment import Environment
from ...strategies.cluster.launchers import detect_environment

__all__ = [
    "ClusterEnvironment",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LayerSync",
    "LightningEnvironment",
    "MPIEnvironment",
    "MixedPrecision",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "TorchSyncBatchNorm",
]

_log = logging.getLogger("echelon.lightning")


class ClusterEnvironment:
    """Base of launchers. Echelon recognizes the launcher by its variables, so this one says what it has found."""

    launcher: ClassVar[str | None] = None
    """Echelon's name of the launcher; None for those that it does not know by name."""

    @property
    def _found(self) -> Environment:
        return detect_environment()

    @classmethod
    def detect(cls) -> bool:
        """Return whether this launcher started the process."""
        return detect_environment().launcher == cls.launcher

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the launcher, and not Echelon, starts the processes."""
        return self._found.is_external

    @property
    def main_address(self) -> str:
        """The address of rank 0's node."""
        return self._found.main_address

    @property
    def main_port(self) -> int | None:
        """The port of rank 0's store; None for any."""
        return self._found.main_port

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._found.world_size

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._found.rank

    def local_rank(self) -> int:
        """Return the rank of this process among those of its node."""
        return self._found.local_rank

    def node_rank(self) -> int:
        """Return the rank of the node."""
        return self._found.node_rank

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher's variables tell."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher's variables tell."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: a trainer compares its settings with the launcher's."""

    def teardown(self) -> None:
        """Do nothing."""


class LightningEnvironment(ClusterEnvironment):
    """Processes that the trainer starts itself."""

    launcher = "none"


class TorchElasticEnvironment(ClusterEnvironment):
    """Processes that torchrun started."""

    launcher = "torchrun"


class SLURMEnvironment(ClusterEnvironment):
    """Processes that srun started.

    Args:
        auto_requeue: has no effect: at SIGTERM or SIGUSR1 the trainer saves a checkpoint and ends with code 143; put
            the job into the queue again in the batch script, and resume with ``ckpt_path="last"``.
        requeue_signal: has no effect either.
    """

    launcher = "srun"

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        self.auto_requeue, self.requeue_signal = auto_requeue, requeue_signal


class KubeflowEnvironment(ClusterEnvironment):
    """Processes of a Kubeflow job."""

    launcher = "Kubeflow"


class MPIEnvironment(ClusterEnvironment):
    """Processes that mpirun started."""

    launcher = "mpirun"


class LSFEnvironment(ClusterEnvironment):
    """Processes that jsrun started, which Echelon does not know: start them with mpirun or torchrun."""


class PrecisionPlugin:
    """Base of precisions, under Lightning's name ``Precision``; a trainer takes what it stands for.

    Args:
        precision: the name, as for ``Trainer(precision=...)``.
    """

    def __init__(self, precision: str = "32-true") -> None:
        self.precision = precision


class MixedPrecision(PrecisionPlugin):
    """Autocast.

    Args:
        precision: ``16-mixed`` or ``bf16-mixed``.
        device: the type of device, which the trainer knows itself.
        scaler: must be None: the trainer has its own.

    Raises:
        ConfigError: for another precision, or with a scaler.
    """

    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed", device: str = "auto", scaler: Any = None
    ) -> None:
        super().__init__(_one_of(type(self), precision, ("16-mixed", "bf16-mixed")))
        self.device = device
        if scaler is not None:
            raise ConfigError(
                f"MixedPrecision needs scaler=None, got {type(scaler).__name__}: with 16-mixed the strategy has one of "
                "its own; leave it out."
            )


class HalfPrecision(PrecisionPlugin):
    """Parameters in half precision.

    Args:
        precision: ``16-true`` or ``bf16-true``.

    Raises:
        ConfigError: for another precision.
    """

    def __init__(self, precision: Literal["16-true", "bf16-true"] = "16-true") -> None:
        super().__init__(_one_of(type(self), precision, ("16-true", "bf16-true")))


class DoublePrecision(PrecisionPlugin):
    """Parameters in double precision."""

    def __init__(self) -> None:
        super().__init__("64-true")


class FSDPPrecision(PrecisionPlugin):
    """Precision of an ``fsdp`` run.

    Args:
        precision: as for ``Trainer(precision=...)``.
        scaler: must be None: the strategy has its own.

    Raises:
        ConfigError: with a scaler.
    """

    def __init__(self, precision: str = "32-true", scaler: Any = None) -> None:
        super().__init__(precision)
        if scaler is not None:
            raise ConfigError(
                f"FSDPPrecision needs scaler=None, got {type(scaler).__name__}: the strategy has one of its own; leave "
                "it out."
            )


def precision_plugin(precision: str, device_type: str) -> PrecisionPlugin:
    """Return the plugin that stands for a precision."""
    if precision.endswith("-mixed"):
        return MixedPrecision(precision, device_type)  # type: ignore[arg-type]
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return DoublePrecision() if precision == "64-true" else PrecisionPlugin(precision)


class LayerSync:
    """Base of plugins that replace layers by synchronized ones."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the module with its layers replaced."""
        return model


class TorchSyncBatchNorm(LayerSync):
    """Synchronized BatchNorm; a trainer takes it as ``sync_batchnorm=True``."""

    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted


_IN_PLACE_OF: Final[tuple[tuple[type, Callable[[Any], str]], ...]] = (
    (
        SLURMEnvironment,
        lambda _: (
            "srun is recognized by its variables; at SIGTERM or SIGUSR1 a checkpoint is saved and the job ends, and "
            "the batch script may requeue it"
        ),
    ),
    (ClusterEnvironment, lambda _: "the launcher is recognized by its variables, and else starts the processes itself"),
    (PrecisionPlugin, lambda plugin: f"precision={plugin.precision!r}"),
    (LayerSync, lambda _: "sync_batchnorm=True"),
)


def settings_of(plugins: Sequence[object], given: dict[str, object]) -> dict[str, Any]:
    """Return the settings that plugins stand for, and log a line for each of them.

    Args:
        plugins: launchers, precisions and synchronized layers.
        given: the settings that the user has given.

    Raises:
        ConfigError: for an object that is no plugin, two precisions, and a precision beside another one.
    """
    settings: dict[str, object] = {}
    for plugin in plugins:
        says = next((says for kind, says in _IN_PLACE_OF if isinstance(plugin, kind)), None)
        if says is None:
            raise ConfigError(
                f"plugins must hold launchers, precisions or checkpoint plugins, got {plugin!r:.80}; set precision= "
                "and strategy=, and start the processes with `echelon launch` or torchrun."
            )
        _log.info("%s is taken: %s.", type(plugin).__name__, says(plugin))
        if isinstance(plugin, LayerSync):
            settings["sync_batchnorm"] = True
        if isinstance(plugin, PrecisionPlugin):
            other = settings.get("precision", given.get("precision"))
            if other is not None and other != plugin.precision:
                raise ConfigError(
                    f"plugins hold {type(plugin).__name__}(precision={plugin.precision!r}), but the precision is set "
                    f"to {other!r}, too; give one of them."
                )
            settings["precision"] = plugin.precision
    return settings


def _one_of(kind: type, precision: str, known: tuple[str, ...]) -> str:
    if precision not in known:
        raise ConfigError(f"{kind.__name__} needs a precision of {', '.join(known)}, got {precision!r}; give one.")
    return precision
