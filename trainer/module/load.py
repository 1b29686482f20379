"""Building a module from a checkpoint: its saved hyper-parameters, then its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from ...strategies.errors import CheckpointError
from .. import checkpoint
from .hparams import init_arguments
from .hparams_json import from_jsonable

_PARTS: Final = ("model", "hyper_parameters", "hyper_parameters_argument", "omitted_hyper_parameters")

M = TypeVar("M", bound=nn.Module)


def load_module(
    cls: type[M],
    path: str | Path,
    map_location: torch.device | str | None,
    strict: bool | None,
    given: Mapping[str, Any],
) -> M:
    """Build a module with its saved hyper-parameters, of which `given` replace some, and load its weights.

    Raises:
        CheckpointError: if the checkpoint is absent or damaged, the module cannot be built, or the weights do not fit.
    """
    found = checkpoint.resolve(path)
    if found is None:
        raise CheckpointError(f"checkpoint_path={str(path)!r} names no checkpoint; give the path of one.")
    state = checkpoint.load(found, parts=_PARTS, lazy=("model",))
    saved = from_jsonable(state["hyper_parameters"])
    arguments = init_arguments(cls, saved, state["hyper_parameters_argument"], given)
    try:
        module = cls(**arguments)
    except TypeError as error:
        omitted = state["omitted_hyper_parameters"]
        reason = f" {omitted} could not be stored as JSON." if omitted else ""
        raise CheckpointError(
            f"{cls.__name__} cannot be built with the arguments {sorted(arguments)}: {error}.{reason} "
            "Pass what is missing to load_from_checkpoint, or call save_hyperparameters() in __init__."
        ) from error
    if map_location is not None:
        module.to(map_location)
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    checkpoint.load_into(module, state["model"], strict=strict)
    return module
