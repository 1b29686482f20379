"""Modules with Lightning's paths and Echelon's names; `stand_in` lets imports of Lightning find them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from ..common.errors import RunError
from ..strategies.launch.worker import IMPORTED_FIRST
from .names import VERSION, exported, find_replacement

ROOTS: Final = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Lightning's packages."""

_BELOW_PYTORCH: Final = (
    *("accelerators", "accelerators.accelerator", "accelerators.cpu", "accelerators.cuda", "accelerators.mps"),
    *("accelerators.xla", "callbacks", "callbacks.batch_size_finder", "callbacks.callback", "callbacks.checkpoint"),
    *("callbacks.device_stats_monitor", "callbacks.early_stopping", "callbacks.finetuning"),
    *("callbacks.gradient_accumulation_scheduler", "callbacks.lambda_function", "callbacks.lr_finder"),
    *("callbacks.lr_monitor", "callbacks.model_checkpoint", "callbacks.model_summary"),
    *("callbacks.on_exception_checkpoint", "callbacks.prediction_writer", "callbacks.progress"),
    *("callbacks.progress.progress_bar", "callbacks.progress.rich_progress", "callbacks.progress.tqdm_progress"),
    *("callbacks.pruning", "callbacks.rich_model_summary", "callbacks.spike", "callbacks.stochastic_weight_avg"),
    *("callbacks.throughput_monitor", "callbacks.timer", "callbacks.weight_averaging", "cli", "core"),
    *("core.datamodule", "core.hooks", "core.mixins", "core.mixins.hparams_mixin", "core.module", "core.optimizer"),
    *("demos", "demos.boring_classes", "demos.mnist_datamodule", "demos.transformer"),
    *("core.saving", "loggers", "loggers.comet", "loggers.csv_logs", "loggers.logger", "loggers.mlflow"),
    *(
        "loggers.neptune",
        "loggers.tensorboard",
        "loggers.utilities",
        "loggers.wandb",
        "plugins",
        "plugins.environments",
    ),
    *("plugins.io.async_plugin", "plugins.io.checkpoint_plugin", "plugins.io.torch_plugin", "plugins.layer_sync"),
    *("plugins.precision.amp", "plugins.precision.double", "plugins.precision.fsdp", "plugins.precision.half"),
    *("plugins.precision.precision", "plugins.precision.bitsandbytes", "plugins.precision.deepspeed"),
    "plugins.precision.transformer_engine",
    *("plugins.io", "plugins.precision", "profilers", "profilers.advanced", "profilers.base", "profilers.profiler"),
    *("profilers.pytorch", "profilers.simple", "serve", "strategies", "strategies.ddp", "strategies.deepspeed"),
    *("strategies.fsdp", "strategies.model_parallel", "strategies.parallel", "strategies.single_device"),
    *("strategies.strategy", "trainer", "trainer.connectors", "trainer.connectors.accelerator_connector"),
    "trainer.connectors.callback_connector",
    *("trainer.states", "trainer.trainer", "tuner", "tuner.lr_finder", "tuner.tuning", "utilities"),
    *("utilities.compile", "utilities.imports", "utilities.parameter_tying", "utilities.signature_utils"),
    *("utilities.combined_loader", "utilities.data", "utilities.enums", "utilities.exceptions", "utilities.grads"),
    *("utilities.memory", "utilities.model_helpers", "utilities.model_summary"),
    *("utilities.model_summary.model_summary", "utilities.parsing", "utilities.rank_zero", "utilities.seed"),
    *("utilities.types", "utilities.warnings"),
)
_BELOW_FABRIC: Final = (
    *(
        "accelerators",
        "accelerators.cuda",
        "accelerators.accelerator",
        "accelerators.cpu",
        "accelerators.mps",
        "accelerators.registry",
        "accelerators.xla",
        "fabric",
        "loggers",
        "plugins",
        "plugins.environments",
        "plugins.io",
    ),
    "plugins.io.checkpoint_io",
    *("plugins.io.torch_io", "plugins.precision", "utilities", "utilities.cloud_io", "wrappers"),
    *("utilities.data", "utilities.init", "utilities.load", "utilities.throughput", "loggers.csv_logs"),
    *("strategies", "strategies.ddp", "strategies.deepspeed", "strategies.fsdp", "strategies.model_parallel"),
    *("strategies.parallel", "strategies.single_device", "strategies.strategy", "loggers.tensorboard"),
    *("utilities.exceptions", "utilities.rank_zero", "utilities.seed", "utilities.types", "utilities.warnings"),
    *("loggers.logger", "strategies.registry", "utilities.apply_func", "utilities.distributed", "utilities.imports"),
    "utilities.throughput",
    *("plugins.environments.cluster_environment", "plugins.environments.lightning", "plugins.environments.slurm"),
    *("plugins.environments.torchelastic", "plugins.environments.kubeflow", "plugins.environments.lsf"),
    *("plugins.environments.mpi", "plugins.environments.xla", "plugins.precision.amp", "plugins.precision.double"),
    *("plugins.precision.fsdp", "plugins.precision.half", "plugins.precision.precision", "utilities.spike"),
    *("plugins.precision.bitsandbytes", "plugins.precision.deepspeed", "plugins.precision.transformer_engine"),
)
MODULES: Final = frozenset(
    {
        *("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
        *(f"{root}.{name}" for root in ("lightning.pytorch", "pytorch_lightning") for name in _BELOW_PYTORCH),
        *(f"{root}.{name}" for root in ("lightning.fabric", "lightning_fabric") for name in _BELOW_FABRIC),
    }
)
"""The Lightning modules that have a stand-in."""


def stand_in() -> None:
    """Let Echelon stand in for Lightning in this process: a library that imports Lightning gets Echelon's classes.

    Call it before the library is imported. The processes that ``fit`` starts do the same; under ``echelon launch`` and
    torchrun, each process runs the program, including this call.

    Raises:
        RunError: if Lightning was already imported.
    """
    if _FINDER in sys.meta_path:
        return
    # a folder of that name that is no package has no file
    imported = [root for root in ROOTS if getattr(sys.modules.get(root), "__file__", None) is not None]
    if imported:
        raise RunError(
            f"stand_in() must come before the first import of Lightning, but {imported[0]!r} is imported already; call "
            "it first."
        )
    sys.meta_path.insert(0, _FINDER)
    IMPORTED_FIRST.append(f"{__package__}.standing_in")


class StandInFinder(MetaPathFinder, Loader):
    """Finds Lightning's modules among ours, before Python looks on disk."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a Lightning module; None for any other module.

        Raises:
            ModuleNotFoundError: for a Lightning module without a counterpart, by name.
        """
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in Echelon, which stands in for Lightning; docs/lightning.md says what "
                "to use.",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return module_of(spec.name, spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up on demand."""


_FINDER: Final = StandInFinder()


class LightningNames(ModuleType):
    """A Lightning module whose names are looked up on demand."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(name, f"Names of {path} over Echelon's.")
        self.__version__ = VERSION
        self.__path__: list[str] = []
        self._lightning_path = path

    def __getattr__(self, name: str) -> Any:
        path = self.__dict__["_lightning_path"]
        if f"{path}.{name}" in MODULES:
            own = self.__dict__["__name__"]
            is_found = own in MODULES and _FINDER in sys.meta_path
            return (
                importlib.import_module(f"{own}.{name}") if is_found else module_of(f"{path}.{name}", f"{own}.{name}")
            )
        if name == "__all__" and (names := exported(path)) is not None:
            return names
        if name.startswith("__"):
            raise AttributeError(name)
        below = path.removeprefix("lightning.pytorch.").removeprefix("pytorch_lightning.")
        try:
            return find_replacement(name, below)
        except AttributeError as error:
            raise AttributeError(f"{path}.{name} has no counterpart in Echelon: {error}") from None


def module_of(path: str, name: str) -> ModuleType:
    """Return the module that stands in for one of Lightning's.

    Args:
        path: Lightning's name of the module.
        name: its own name.
    """
    return LightningNames(path, name)
