"""Building a module or a data module from a checkpoint: its saved hyper-parameters, then its state."""

from __future__ import annotations

import ast
import csv
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from ...strategies.errors import CheckpointError, ConfigError
from .. import checkpoint
from .hparams import init_arguments
from .hparams_json import from_jsonable

MapLocation = torch.device | str | Mapping[str, str] | Callable[[Any, str], Any] | None

M = TypeVar("M")
N = TypeVar("N", bound=nn.Module)

NAMES_FOR_HOOKS: Final = {"model": "state_dict", "optimizers": "optimizer_states"}
"""The parts of a checkpoint that hooks see under Lightning's names."""


def as_hooks_see(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint under Lightning's names, with ``epoch`` and ``global_step``."""
    loop = saved.get("loop", {})
    state = {NAMES_FOR_HOOKS.get(part, part): value for part, value in saved.items()}
    return {**state, "epoch": loop.get("epoch", 0), "global_step": loop.get("global_step", 0)}


def load_module(
    cls: type[N],
    path: str | Path,
    map_location: MapLocation,
    hparams_file: str | Path | None,
    strict: bool | None,
    given: Mapping[str, Any],
) -> N:
    """Build a module with its saved hyper-parameters, some replaced by `given`, and load its weights.

    Raises:
        CheckpointError: if the checkpoint is absent or damaged, the module cannot be built, or the weights do not fit.
        ConfigError: if `strict` contradicts the ``strict_loading`` that the module sets.
    """
    state = as_hooks_see(checkpoint.load(_resolve(path), lazy=("model",)))
    module = _build(cls, state, "", hparams_file, given)
    own = bool(getattr(module, "strict_loading", True))
    is_set = not own or "strict_loading" in vars(module)
    if is_set and strict is not None and strict != own:
        raise ConfigError(
            f"strict must agree with {cls.__name__}.strict_loading={own}, got strict={strict}; set both alike."
        )
    for prepare, arguments in (("configure_model", ()), ("on_load_checkpoint", (state,))):
        getattr(module, prepare, lambda *_: None)(*arguments)
    is_strict = own if strict is None else strict
    difference = checkpoint.load_into(module, state["state_dict"], strict=is_strict)
    if difference:
        warnings.warn(f"Not all weights of {cls.__name__} were loaded (strict=False).\n{difference}", stacklevel=3)
    return module.to(_device(map_location))


def load_datamodule(
    cls: type[M], path: str | Path, hparams_file: str | Path | None, given: Mapping[str, Any]
) -> tuple[M, Mapping[str, Any]]:
    """Build a data module with its saved hyper-parameters, some replaced by `given`; return it and its saved state.

    Raises:
        CheckpointError: if the checkpoint is absent or damaged, or the data module cannot be built.
    """
    state = checkpoint.load(_resolve(path), lazy=("model",))
    return _build(cls, state, "datamodule_", hparams_file, given), state.get("datamodule", {})


def _resolve(path: str | Path) -> Path:
    folder = checkpoint.resolve(path)
    if folder is None:
        raise CheckpointError(f"checkpoint_path must be a checkpoint, got {str(path)!r}; give the path of one.")
    return folder


def _build(
    cls: type[M], state: Mapping[str, Any], prefix: str, hparams_file: str | Path | None, given: Mapping[str, Any]
) -> M:
    """Call the constructor with the hyper-parameters that are saved under names with this prefix."""
    key = f"{prefix}hyper_parameters"
    saved: Any = from_jsonable(state.get(key, {})) if hparams_file is None else _read_hparams(Path(hparams_file))
    if state.get(f"{key}_type") == "omegaconf":
        from omegaconf import OmegaConf

        saved = OmegaConf.create(dict(saved))
    arguments = init_arguments(cls, saved, state.get(f"{key}_argument"), given)
    omitted = state.get(f"omitted_{key}")
    try:
        built = cls(**arguments)
    except TypeError as error:
        reason = f" {omitted} could not be stored as JSON." if omitted else ""
        raise CheckpointError(
            f"{cls.__name__} cannot be built with the arguments {sorted(arguments)}: {error}.{reason} "
            "Pass what is missing to load_from_checkpoint, or call save_hyperparameters() in __init__."
        ) from error
    missing = [name for name in omitted or () if name not in arguments]
    if missing:
        warnings.warn(
            f"The arguments {missing} of {cls.__name__} could not be stored as JSON and have their defaults now; pass "
            "them to load_from_checkpoint.",
            stacklevel=5,
        )
    return built


def _read_hparams(path: Path) -> dict[str, Any]:
    """Read hyper-parameters from YAML, or from the CSV files (``key,value``) that Lightning reads."""
    if path.suffix in (".yaml", ".yml"):
        import yaml

        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    if path.suffix != ".csv":
        raise ConfigError(f"hparams_file must end with .yaml, .yml or .csv, got {str(path)!r}; convert it.")
    with path.open(encoding="utf-8", newline="") as file:
        return {row["key"]: _literal(row["value"]) for row in csv.DictReader(file)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _device(map_location: MapLocation) -> torch.device:
    """Return where a module goes whose weights were read on the CPU."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    storage = map_location(torch.empty(1).untyped_storage(), "cpu")
    return torch.device("cpu") if storage is None else torch.device(storage.device)
