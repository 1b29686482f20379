"""Libraries of models: whose a model is, and in which files a folder of that library holds its weights and config."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...common.errors import CheckpointError, MissingDependencyError
from ...common.foreign import attribute_of
from ...common.internals.hugging_face import save_timm_config
from ..state.dtensor import plain_kind
from .conversions import is_of_transformers
from .find_folder import CONFIG, DIFFUSION, SINGLE, config_of, pipeline_of


@dataclass(frozen=True)
class Library:
    """A library whose models can be written as folders that it reads."""

    name: str
    weights: str
    """The file of weights, if there is one only."""
    can_be_split: bool
    """Whether the library reads weights from several files."""
    has: Callable[[nn.Module], bool]
    """Whether a model is of this library."""
    write_config: Callable[[object, Path, torch.dtype], None]
    """Writes the config of a model, whose weights have this dtype, into a folder."""
    build: Callable[[Path], nn.Module]
    """Builds the model that the config of a folder describes, without its weights."""


def library_of(model: nn.Module) -> Library | None:
    """Return the library of a model; None for any other module."""
    return next((library for library in LIBRARIES if library.has(model)), None)


def is_of_timm(model: nn.Module) -> bool:
    """Return whether a model was built by ``timm.create_model``, or by a function that timm has registered."""
    return "timm.models" in sys.modules and isinstance(vars(model).get("pretrained_cfg"), dict)


def is_of_diffusers(model: nn.Module) -> bool:
    """Return whether a model is a ``ModelMixin`` of diffusers, such as a UNet or an autoencoder."""
    module: Any = sys.modules.get("diffusers.models.modeling_utils")  # without it, there is none
    return module is not None and isinstance(model, module.ModelMixin)


def model_described_by(folder: Path) -> nn.Module:
    """Return the model that a folder's config describes, without memory.

    Raises:
        CheckpointError: if it describes none that a library here has.
        MissingDependencyError: without the library.
    """
    config = config_of(folder)
    library = _DIFFUSERS if "_class_name" in config else _TIMM if "architecture" in config else _TRANSFORMERS
    try:
        with torch.device("meta"):
            return library.build(folder)
    except ImportError:
        raise MissingDependencyError(
            f"{folder} can be the base of a Hugging Face folder only with {library.name}; install it."
        ) from None


def copy_pipeline(source: Path, folder: Path) -> Path:
    """Copy the pipeline of diffusers of which `source` is a part, without it, and return where the part belongs.

    A folder that is no part of a pipeline is returned as it is.
    """
    pipeline = pipeline_of(source)
    if pipeline is None:
        return folder
    for entry in pipeline.iterdir():
        if entry.is_dir() and entry.name != source.name and not entry.name.startswith("."):
            shutil.copytree(entry, folder / entry.name)
        elif entry.is_file():
            shutil.copyfile(entry, folder / entry.name)
    part = folder / source.name
    part.mkdir()
    return part


def _config_of_transformers(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the config of a model, and that of its generation, as ``save_pretrained`` does."""
    config: Any = copy.deepcopy(model.config)
    parts = [attribute_of(config, name) for name in attribute_of(config, "sub_configs") or ()]
    for one in (config, *(part for part in parts if part is not None)):  # such as of text and of vision
        one.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [plain_kind(model).__name__]
    if getattr(getattr(config, "quantization_config", None), "quant_method", None) == "gguf":
        del config.quantization_config  # a model that was read from such a file has plain values, and so has the folder
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _config_of_timm(model: object, folder: Path, dtype: torch.dtype) -> None:
    save_timm_config(model, folder / CONFIG)


def _config_of_diffusers(model: Any, folder: Path, dtype: torch.dtype) -> None:
    model.save_config(str(folder))


def _build_of_transformers(folder: Path) -> nn.Module:
    import transformers

    names = config_of(folder).get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if kind is None:
        raise CheckpointError(
            f"The {CONFIG} of {folder} names no model of transformers, found architectures={names!r}; give as base the "
            "folder that the model was loaded from."
        )
    model: nn.Module = kind(transformers.AutoConfig.from_pretrained(folder))
    return model


def _build_of_timm(folder: Path) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False)
    return model


def _build_of_diffusers(folder: Path) -> nn.Module:
    import diffusers

    name = str(config_of(folder)["_class_name"])
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise CheckpointError(
            f"The {CONFIG} of {folder} names {name!r}, which diffusers {diffusers.__version__} does not have; install "
            "the version that wrote it."
        )
    model: nn.Module = kind.from_config(kind.load_config(folder))
    return model


_TRANSFORMERS: Final = Library(
    "transformers", SINGLE, True, is_of_transformers, _config_of_transformers, _build_of_transformers
)
_DIFFUSERS: Final = Library("diffusers", DIFFUSION, True, is_of_diffusers, _config_of_diffusers, _build_of_diffusers)
_TIMM: Final = Library("timm", SINGLE, False, is_of_timm, _config_of_timm, _build_of_timm)
LIBRARIES: Final = (_TRANSFORMERS, _DIFFUSERS, _TIMM)
