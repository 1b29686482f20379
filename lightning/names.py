"""Lightning's names: the module of ours that has each, and for those without a counterpart, what to use."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..common.errors import ConfigError, did_you_mean

VERSION: Final = "2.6.6+echelon"
"""The version of Lightning whose names these are, for libraries that ask for it."""

_SHELVES: Final = (
    "callbacks",
    "strategies",
    "trainer.loggers",
    "trainer.session.profiler",
    "trainer.session.detailed_profilers",
    "lightning.parts",
    "lightning.extras.rank_zero",
    "lightning.extras.utilities",
    "lightning.extras.parsing",
    "lightning.extras.machine",
    "lightning.checkpoint_files",
    "lightning.extras.plugins",
    "lightning.demos.boring",
    "lightning.demos.text",
    "lightning.demos.images",
)
"""Modules of ours whose public names are also Lightning's."""

_ELSEWHERE: Final[Mapping[str, str]] = {
    "LightningModule": "lightning.module:LightningModule",
    "LightningDataModule": "lightning.module:LightningDataModule",
    "Trainer": "lightning.trainer:LightningTrainer",
    "seed_everything": "lightning.extras.machine:seed_everything",
    "_IS_WINDOWS": "lightning.extras.utilities:_IS_WINDOWS",
    "convert_inf": "lightning.tqdm_bar:convert_inf",
    "get_standard_metrics": "lightning.parts:get_standard_metrics",
    "CombinedLoader": "trainer.data.combined_loader:CombinedLoader",
    "rank_zero_only": "lightning.extras.rank_zero:rank_zero_only",
    "PyTorchProfiler": "lightning.profiler:TorchProfiler",
    "SimpleProfiler": "lightning.profiler:RecordingProfiler",
    "AdvancedProfiler": "lightning.profiler:FunctionProfiler",
    "Tqdm": "lightning.tqdm_bar:Tqdm",
    "ExperimentWriter": "trainer.loggers:CSVLogger",
    **{
        name: f"lightning.extras.loggers:{name}"
        for name in ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger", "Logger")
    },
    "TQDMProgressBar": "lightning.tqdm_bar:KeptProgressBar",
    "Checkpoint": "callbacks:ModelCheckpoint",
    "ModelCheckpoint": "lightning.extras.saved_callbacks:ModelCheckpoint",
    "EarlyStopping": "lightning.extras.saved_callbacks:EarlyStopping",
    "LRSchedulerConfig": "trainer.module.optimizers:LRSchedulerConfig",
    "LightningOptimizer": "trainer.module.optimizers:ManagedOptimizer",
    "AttributeDict": "trainer.module.hparams:AttributeDict",
    "HyperparametersMixin": "trainer.module.hparams:HyperparametersMixin",
    "DummyExperiment": "trainer.loggers.dummy:DummyExperiment",
    "TrainerState": "trainer.session.train_state:TrainerState",
    "MisconfigurationException": "common.errors:EchelonError",
    "Tuner": "lightning.tuning.tuner:Tuner",
    "LightningCLI": "lightning.command_line.cli:LightningCLI",
    "LightningArgumentParser": "lightning.command_line.parser:LightningArgumentParser",
    "SaveConfigCallback": "lightning.command_line.save_config:SaveConfigCallback",
    "instantiate_class": "lightning.command_line.configured:instantiate_class",
    "ArgsType": "lightning.command_line.types:ArgsType",
    "OptimizerCallable": "lightning.command_line.types:OptimizerCallable",
    "LRSchedulerCallable": "lightning.command_line.types:LRSchedulerCallable",
    "Fabric": "lightning.own_loops.fabric:Fabric",
    "EarlyStoppingReason": "callbacks.early_stopping:EarlyStoppingReason",
    "Precision": "lightning.extras.plugins:PrecisionPlugin",
    "SpikeDetection": "lightning.extras.spike_detection:SpikeDetection",
    "TrainingSpikeException": "lightning.extras.spike_detection:TrainingSpikeException",
    "ModelPruning": "lightning.extras.model_pruning:ModelPruning",
    "_LRFinder": "callbacks:LearningRateCurve",
    "_AcceleratorConnector": "lightning.parts:AcceleratorChoice",
    "STRATEGY_REGISTRY": "lightning.parts:StrategyRegistry",
    "ACCELERATOR_REGISTRY": "lightning.parts:AcceleratorRegistry",
    "PositionalEncoding": "lightning.demos.text:PositionalEncoding",
    "ModelHooks": "trainer.module.hooks:ModuleHooks",
    "CheckpointHooks": "trainer.module.hooks:ModuleHooks",
    "DataHooks": "trainer.module.data_module:DataHooks",
    "pl_load": "lightning.checkpoint_files:load_checkpoint",
    "_load": "lightning.checkpoint_files:load_checkpoint",
    "_lazy_load": "lightning.checkpoint_files:lazy_load",
    "_NotYetLoadedTensor": "lightning.checkpoint_files:NotYetLoadedTensor",
    "_EmptyInit": "lightning.own_loops.building:EmptyInit",
    "_materialize_meta_tensors": "lightning.own_loops.building:materialize_meta_tensors",
    "Throughput": "lightning.own_loops.throughput:Throughput",
    "measure_flops": "lightning.own_loops.throughput:measure_flops",
    "get_available_flops": "lightning.own_loops.throughput:get_available_flops",
    "_load_from_checkpoint": "lightning.module:load_from_checkpoint",
    "summarize": "lightning.extras.summary:summary_of",
    "LEFTOVER_PARAMS_NAME": "lightning.extras.summary:LEFTOVER_PARAMS_NAME",
    "NOT_APPLICABLE": "lightning.extras.summary:NOT_APPLICABLE",
    "get_human_readable_count": "lightning.extras.summary:get_human_readable_count",
    "WeightAveraging": "lightning.extras.weight_averaging:AverageShown",
    "EMAWeightAveraging": "lightning.extras.weight_averaging:ExponentialAverageShown",
    **{
        name: f"lightning.extras.deprecated_plugins:{name}"
        for name in (
            *("DoublePrecisionPlugin", "HalfPrecisionPlugin", "MixedPrecisionPlugin", "FSDPPrecisionPlugin"),
            "FSDPMixedPrecisionPlugin",
        )
    },
    "PrecisionPlugin": "lightning.extras.deprecated_plugins:OldPrecisionPlugin",
    "LightningDoublePrecisionModule": "lightning.extras.deprecated_plugins:uncalled_wrapper",
    "_Stateful": "lightning.extras.parsing:Stateful",
    "is_picklable": "strategies.distributed.pickling:is_picklable",
    "_unwrap_objects": "lightning.extras.utilities:unwrap_objects",
}
"""Names that are elsewhere, or have a different name there."""

_IN_ONE_MODULE: Final[Mapping[tuple[str, str], str]] = {
    ("utilities.model_summary", "ModelSummary"): "lightning.extras.summary:SummaryOf",
    ("utilities.model_summary.model_summary", "ModelSummary"): "lightning.extras.summary:SummaryOf",
    **{
        ("cli", name): f"lightning.command_line.types:{name}"
        for name in ("LRSchedulerType", "LRSchedulerTypeTuple", "LRSchedulerTypeUnion", "ReduceLROnPlateau")
    },
    **{
        (f"{root}.{module}", name): place
        for root in ("lightning.fabric", "lightning_fabric")
        for module, name, place in (
            ("utilities.spike", "SpikeDetection", "lightning.extras.spike_detection:FabricSpikeDetection"),
            ("utilities", "ThroughputMonitor", "lightning.own_loops.throughput:FabricThroughputMonitor"),
            ("utilities.throughput", "ThroughputMonitor", "lightning.own_loops.throughput:FabricThroughputMonitor"),
            ("loggers", "CSVLogger", "lightning.own_loops.loggers:FabricCSVLogger"),
            ("loggers.csv_logs", "CSVLogger", "lightning.own_loops.loggers:FabricCSVLogger"),
            ("loggers", "TensorBoardLogger", "lightning.own_loops.loggers:FabricTensorBoardLogger"),
            ("loggers.tensorboard", "TensorBoardLogger", "lightning.own_loops.loggers:FabricTensorBoardLogger"),
        )
    },
}
"""Names that mean something else in one of Lightning's modules."""

_OTHER_MEANING: Final = frozenset({"ParallelStrategy", "Precision"})
"""Names of ours that mean something else in Lightning."""

_OF_OTHERS: Final[Mapping[str, str]] = {
    "LightningEnum": "enum:StrEnum",
    "PossibleUserWarning": "builtins:UserWarning",
    "SIGTERMException": "builtins:SystemExit",
    "Optimizable": "torch.optim:Optimizer",
    "LRScheduler": "torch.optim.lr_scheduler:LRScheduler",
    "_distributed_is_initialized": "torch.distributed:is_initialized",
    "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
}
"""Names for which a class of Python, torch or tqdm does the same."""

ANNOTATIONS: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        (
            *("STEP_OUTPUT", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "OptimizerLRScheduler", "LRSchedulerType"),
            *("LRSchedulerTypeUnion", "LRSchedulerPLType", "OptimizerConfig", "OptimizerLRSchedulerConfig", "ArgsType"),
            *("LRSchedulerConfigType", "_EVALUATE_OUTPUT", "_PREDICT_OUTPUT", "_PATH", "_MAP_LOCATION_TYPE", "_DEVICE"),
        ),
        Any,
    ),
    "LRSchedulerTypeTuple": (LRScheduler, ReduceLROnPlateau),
}
"""Names that are used only in annotations."""

WITHOUT_COUNTERPART: Final[Mapping[str, str]] = {
    "CometLogger": "a logger of your own: docs/logging.md says what one needs",
    "NeptuneLogger": "a logger of your own: docs/logging.md says what one needs",
    "LitLogger": "a logger of your own: docs/logging.md says what one needs",
    "BitsandbytesPrecision": "Trainer(precision='bf16-mixed'), and convert the layers in configure_model",
    "TransformerEnginePrecision": "Trainer(precision='bf16-mixed'), and convert the layers in configure_model",
    "XLAPrecision": "Trainer(precision=...)",
    "XLACheckpointIO": "nothing: checkpoints are written beside the steps",
    "XLAEnvironment": "the launcher: `echelon launch`, torchrun and Slurm are recognised",
    "DeepSpeedPrecision": "Trainer(precision=...)",
    "DeepSpeedStrategy": "FSDPStrategy",
    "ModelParallelStrategy": "ParallelStrategy of Echelon",
    "ParallelStrategy": "Strategy, or the strategy's name",
    "XLAStrategy": "DDPStrategy",
    "XLAProfiler": "SimpleProfiler",
    "ServableModule": "a server of your own; docs/what_echelon_does_not_do.md",
    "ServableModuleValidator": "a server of your own; docs/what_echelon_does_not_do.md",
}
"""Names that raise when they are used."""


_PRECISIONS: Final = (
    *("BitsandbytesPrecision", "DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "HalfPrecision"),
    *("MixedPrecision", "Precision", "TransformerEnginePrecision", "XLAPrecision"),
)
_FILES: Final = ("AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO", "XLACheckpointIO")
_HELPERS: Final = (
    *("AttributeDict", "disable_possible_user_warnings", "is_shared_filesystem", "LightningEnum", "measure_flops"),
    *("move_data_to_device", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"),
    "suggested_max_num_workers",
)
_OF_PYTORCH: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("Trainer", "LightningDataModule", "LightningModule", "Callback", "seed_everything"),
    "accelerators": (
        *("Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "XLAAccelerator"),
        "find_usable_cuda_devices",
    ),
    "callbacks": (
        *("BackboneFinetuning", "BaseFinetuning", "BasePredictionWriter", "BatchSizeFinder", "Callback", "Checkpoint"),
        *("DeviceStatsMonitor", "EarlyStopping", "GradientAccumulationScheduler", "LambdaCallback"),
        *("LearningRateFinder", "LearningRateMonitor", "ModelCheckpoint", "ModelPruning", "ModelSummary"),
        *("OnExceptionCheckpoint", "ProgressBar", "RichModelSummary", "RichProgressBar", "StochasticWeightAveraging"),
        *("SpikeDetection", "ThroughputMonitor", "Timer", "TQDMProgressBar", "EMAWeightAveraging", "WeightAveraging"),
    ),
    "core": ("LightningDataModule", "LightningModule"),
    "demos": (
        *("LightningTransformer", "Transformer", "WikiText2", "BoringModel", "BoringDataModule"),
        "DemoModel",
    ),
    "loggers": ("LitLogger", "CometLogger", "CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
    "plugins": (*_FILES, *_PRECISIONS, "LayerSync", "TorchSyncBatchNorm"),
    "plugins.io": _FILES,
    "plugins.precision": _PRECISIONS,
    "profilers": (
        *("Profiler", "AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler", "SimpleProfiler", "XLAProfiler"),
    ),
    "serve": ("ServableModuleValidator", "ServableModule"),
    "strategies": (
        *("DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy", "ParallelStrategy"),
        *("SingleDeviceStrategy", "Strategy"),
    ),
    "trainer": ("Trainer", "seed_everything"),
    "utilities": (
        *(*_HELPERS, "CombinedLoader", "find_shared_parameters", "grad_norm", "GradClipAlgorithmType", "is_picklable"),
        "set_shared_parameters",
    ),
}
_OF_FABRIC: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("Fabric", "seed_everything"),
    "plugins": ("ClusterEnvironment", *(name for name in _FILES if name[0] != "A"), *_PRECISIONS),
    "utilities": (*_HELPERS, "Throughput", "ThroughputMonitor"),
}


def exported(path: str) -> tuple[str, ...] | None:
    """Return what ``from <path> import *`` binds for one of Lightning's packages; None for a module in one."""
    if path == "lightning":
        return (*_OF_PYTORCH[""], "Fabric")
    for root, table in (
        *((root, _OF_PYTORCH) for root in ("lightning.pytorch", "pytorch_lightning")),
        *((root, _OF_FABRIC) for root in ("lightning.fabric", "lightning_fabric")),
    ):
        if path == root or path.startswith(f"{root}."):
            return table.get(path[len(root) + 1 :])
    return None


RENAMED: Final[Mapping[str, str]] = {"LightningModule": "TrainModule", "LightningDataModule": "DataModule"}
"""Classes with a different name in Echelon."""

PUBLIC_AT_ROOT: Final = frozenset(
    {
        *("AdvancedProfiler", "BasePredictionWriter", "BatchSizeFinder", "LearningRateFinder", "RichProgressBar"),
        *("CSVLogger", "Callback", "CombinedLoader", "DDPStrategy"),
        *("DeviceStatsMonitor", "EMAWeightAveraging", "EarlyStopping", "FSDPStrategy", "GradientAccumulationScheduler"),
        *("LambdaCallback", "LearningRateMonitor", "LightningDataModule", "LightningModule", "Logger"),
        *("ModelCheckpoint", "ModelSummary", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"),
        *("SingleDeviceStrategy", "StochasticWeightAveraging", "Strategy", "TQDMProgressBar", "TensorBoardLogger"),
        *("ThroughputMonitor", "Timer", "Trainer", "WeightAveraging", "rank_zero_only", "seed_everything"),
    }
)
"""Lightning's names that ``import echelon`` has, under this name or that in `RENAMED`."""


def find_replacement(name: str, module: str = "") -> Any:
    """Return the object that replaces a Lightning name.

    Args:
        name: the name.
        module: the module below ``lightning.pytorch`` that it is imported from, for the few names with two meanings.

    Raises:
        AttributeError: for an unknown name.
    """
    place = _IN_ONE_MODULE.get((module, name)) or _ELSEWHERE.get(name)
    if place is not None:
        return _object_at(place)
    for shelf in _SHELVES:
        if name in _public_names(shelf):
            return _public_names(shelf)[name]
    if name in _OF_OTHERS:
        owner, _, attribute = _OF_OTHERS[name].partition(":")
        return getattr(importlib.import_module(owner), attribute)
    if name in ANNOTATIONS:
        return ANNOTATIONS[name]
    if name in WITHOUT_COUNTERPART:
        return make_refusing_class(name)
    if name.endswith("_AVAILABLE"):
        return _object_at("lightning.extras.utilities:is_available")(name)
    if "_GREATER_EQUAL_" in name:
        return _object_at("lightning.extras.utilities:is_at_least")(name)
    raise AttributeError(f"{name!r} is not known.{_suggest_name(name)}")


@cache  # jsonargparse asks for the same names hundreds of times, to find out where a class is
def _suggest_name(name: str) -> str:
    return did_you_mean(name, difflib.get_close_matches(name, known_names(), n=1))


@cache
def known_names() -> frozenset[str]:
    """Return every Lightning name that is replaced or refused by name."""
    shelves = (name for shelf in _SHELVES for name in _public_names(shelf))
    return frozenset({*_ELSEWHERE, *shelves, *_OF_OTHERS, *ANNOTATIONS, *WITHOUT_COUNTERPART})


def is_known(name: str) -> bool:
    """Return whether a name is replaced, or is refused by name."""
    return name in known_names() or tells_what_is_installed(name)


def tells_what_is_installed(name: str) -> bool:
    """Return whether a name is a flag about a package: ``_RICH_AVAILABLE``, ``_TORCH_GREATER_EQUAL_2_6``."""
    return name.endswith("_AVAILABLE") or "_GREATER_EQUAL_" in name


def has_counterpart(name: str) -> bool:
    """Return whether a name has a replacement that works."""
    return is_known(name) and name not in WITHOUT_COUNTERPART


def find_in_fabric(module: str, name: str) -> tuple[str, str] | None:
    """Return the module and the name of what replaces a name that means something else in a module of Fabric."""
    place = _IN_ONE_MODULE.get((module, name)) if "fabric" in module else None
    if place is None:
        return None
    room, _, own = place.partition(":")
    return f"echelon.{room}", own


def make_refusing_class(name: str) -> type:
    """Return a class of this name that libraries may import and subclass, and that raises when it is called."""
    use = WITHOUT_COUNTERPART[name]

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        raise ConfigError(f"{name} has no counterpart in Echelon, got {type(self).__name__}(...); use {use}.")

    return type(name, (), {"__init__": __init__, "__doc__": f"Use {use}."})


@cache
def _public_names(shelf: str) -> Mapping[str, object]:
    module = _import_module(shelf)
    found = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module))}
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_")
        and name not in _OTHER_MEANING
        # names that a module has imported are not its own
        and getattr(value, "__module__", module.__name__).startswith(module.__name__)
        and not isinstance(value, ModuleType)
    }


def _object_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(_import_module(module), name)


def _import_module(name: str) -> ModuleType:
    return importlib.import_module(f"..{name}", __package__)
