"""Building a module or a data module from a checkpoint: its saved hyper-parameters, then its state."""

from __future__ import annotations

import ast
import csv
import difflib
import inspect
import io
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from ...common.errors import CheckpointError, ConfigError, ModuleError
from ...common.storage import AnyPath, any_path, at_hand
from ...strategies.devices.moves import move_module
from ...strategies.distributed.collectives import Collectives
from ...strategies.state.omitted_weights import OMITTED, complete_state, note_changed
from ...strategies.state.regular_file import read_regular
from ...strategies.state.schema import format_as_line
from .. import checkpoint
from ..checkpoint.saved_state import NAMES_FOR_HOOKS, check_saved
from .hparams import init_arguments
from .hparams_json import from_jsonable
from .unresolved import escape_interpolations, is_from_environment, with_marks
from .yaml_bounds import check_yaml

MapLocation = torch.device | str | Mapping[str, str] | Callable[[Any, str], Any] | None
Decoder = Callable[[Mapping[str, object], type], Mapping[str, object]]
"""Returns stored hyper-parameters as values, for the class to build with them."""

M = TypeVar("M")
N = TypeVar("N", bound=nn.Module)

if TYPE_CHECKING:
    classmethod_only = classmethod
else:

    class classmethod_only(classmethod):  # noqa: N801 - the name of a decorator
        """A class method that cannot be called on an instance, since a caller would expect the instance to change."""

        def __get__(self, instance: object, owner: type | None = None) -> Callable[..., object]:
            if instance is None:
                return super().__get__(instance, owner)

            def refuse(*args: object, **kwargs: object) -> None:
                kind, name = type(instance).__name__, self.__func__.__name__
                raise ModuleError(
                    f"{name} must be called on the class, got an instance of {kind}, which it does not change; write "
                    f"module = {kind}.{name}(...)."
                )

            return refuse


_ALONE: Final = Collectives(None, torch.device("cpu"))
_ARGUMENTS: Final = ("map_location", "hparams_file", "strict")
"""Arguments of ``load_from_checkpoint`` that are not the constructor's."""
_PARTS_OF_NAMES: Final = {"module.": "torch's DistributedDataParallel", "_orig_mod.": "torch.compile"}
_LARGEST_HPARAMS: Final = 8 << 20
"""Bytes of an `hparams_file`."""
_MOST_HPARAMS: Final = 1_000_000


def as_hooks_see(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint under Lightning's names, with ``epoch`` and ``global_step``."""
    loop = saved.get("loop", {})
    state = {NAMES_FOR_HOOKS.get(part, part): value for part, value in saved.items()}
    return {**state, "epoch": loop.get("epoch", 0), "global_step": loop.get("global_step", 0)}


def load_module(
    cls: type[N],
    path: str | AnyPath,
    map_location: MapLocation,
    hparams_file: str | Path | None,
    strict: bool | None,
    given: Mapping[str, object],
) -> N:
    """Build a module with its saved hyper-parameters, some replaced by `given`, and load its weights.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, the module cannot be built, or the weights do not fit.
        ConfigError: if `strict` contradicts the ``strict_loading`` that the module sets.
    """
    return module_from(cls, as_hooks_see(_load_state(path)), map_location, hparams_file, strict, given)


def module_from(
    cls: type[N],
    state: dict[str, Any],
    map_location: MapLocation,
    hparams_file: str | Path | None,
    strict: bool | None,
    given: Mapping[str, object],
    decode: Decoder = from_jsonable,
) -> N:
    """Do what `load_module` does with a state that was read before, under Lightning's names.

    Args:
        cls: the class of the module.
        state: the state; hooks may change it.
        map_location: as in `TrainModule.load_from_checkpoint`.
        hparams_file: as in `TrainModule.load_from_checkpoint`.
        strict: as in `TrainModule.load_from_checkpoint`.
        given: arguments that replace hyper-parameters.
        decode: returns the values of the stored hyper-parameters.
    """
    module = _build_from_hparams(cls, state, "", hparams_file, given, decode)
    chosen = getattr(module, "strict_loading", True)  # None is Lightning's word for unset
    own = chosen is None or bool(chosen)
    is_set = not own or vars(module).get("strict_loading") is not None
    if is_set and strict is not None and strict != own:
        raise ConfigError(
            f"strict={strict} is in conflict with {cls.__name__}.strict_loading={own}; set both to the same value."
        )
    getattr(module, "configure_model", lambda: None)()
    read = set(state["state_dict"])
    if state.get(OMITTED):
        state["state_dict"] = complete_state(state["state_dict"], state[OMITTED], module.state_dict(), _ALONE)
    getattr(module, "on_load_checkpoint", lambda _: None)(state)
    is_strict = own if strict is None else strict
    weights = _without_compiled(module, state["state_dict"])
    difference = checkpoint.load_into(module, weights, strict=is_strict)
    note_changed(module, read)
    if difference:
        warnings.warn(f"Not all weights of {cls.__name__} were loaded (strict=False).\n{difference}", stacklevel=3)
    move_module(module, _target_device(map_location))
    return module


def load_datamodule(
    cls: type[M], path: str | AnyPath, hparams_file: str | Path | None, given: Mapping[str, object]
) -> tuple[M, Mapping[str, object]]:
    """Build a data module with its saved hyper-parameters, some replaced by `given`; return it and its saved state.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or the data module cannot be built.
    """
    state = _load_state(path)
    return datamodule_from(cls, state, hparams_file, given), state.get("datamodule", {})


def datamodule_from(
    cls: type[M],
    state: Mapping[str, object],
    hparams_file: str | Path | None,
    given: Mapping[str, object],
    decode: Decoder = from_jsonable,
) -> M:
    """Build a data module as `load_datamodule` does, from a state that was read before."""
    return _build_from_hparams(cls, state, "datamodule_", hparams_file, given, decode)


def hint_about(state: Mapping[str, object], names: Collection[str]) -> str:
    """Return what to do with a state whose names are not the module's; empty if they are, or nothing is known."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state.get(key), Mapping):
            return (
                f"The dict is a whole checkpoint, which has the weights under {key!r}: pass checkpoint[{key!r}], or "
                "read the file with echelon.load_weights."
            )
    for part, maker in _PARTS_OF_NAMES.items():
        if any(part in name for name in state) and {name.replace(part, "") for name in state} & set(names):
            return (
                f"The names hold {part!r}, which {maker} adds: pass {{name.replace({part!r}, ''): value for name, "
                "value in state.items()}."
            )
    return ""


def _without_compiled(module: nn.Module, state: Mapping[str, object]) -> Mapping[str, Any]:
    """Return saved weights under the module's names, if only ``torch.compile`` of a submodule makes the difference."""
    part = "_orig_mod."
    own = set(module.state_dict())
    if not any(part in name for name in (*own, *state)):
        return state
    named = {name.replace(part, ""): name for name in own}
    return {named.get(name.replace(part, ""), name): state[name] for name in state}


def _point_out_misspelt(cls: type, given: Mapping[str, object]) -> None:
    """Warn of arguments that the constructor does not take, but one with nearly the same name."""
    taken = inspect.signature(cls).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return
    for name, value in given.items():
        near = difflib.get_close_matches(name, taken, n=1, cutoff=0.8)
        near = near or difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.65)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        if "hparam" in name and isinstance(value, Mapping):
            hint = f"Pass its items as arguments of their own: {', '.join(f'{key}=...' for key in value)}."
        if name not in taken and hint:
            warnings.warn(
                f"load_from_checkpoint got {name}={value!r:.60}, which {cls.__name__}.__init__ does not take; it is "
                f"left out. {hint}",
                stacklevel=5,
            )


def _load_state(path: str | AnyPath) -> dict[str, Any]:
    if isinstance(path, Mapping):
        raise CheckpointError(
            f"checkpoint_path must be the path of a checkpoint, got a dict with the keys {list(path)!r:.80}; give the "
            "path it was read from, or make the module and call module.load_state_dict with the weights in it."
        )
    folder = checkpoint.resolve_checkpoint(path)
    if folder is None:
        raise CheckpointError(f"checkpoint_path must be a checkpoint, got {str(path)!r}; give the path of one.")
    state = checkpoint.load(folder, lazy=("model",))
    check_saved(state, str(folder))
    return state


def _build_from_hparams(
    cls: type[M],
    state: Mapping[str, Any],
    prefix: str,
    hparams_file: str | Path | None,
    given: Mapping[str, Any],
    decode: Decoder,
) -> M:
    """Call the constructor with the hyper-parameters saved under this prefix."""
    key = f"{prefix}hyper_parameters"
    stored = state.get(key, {})
    if state.get(f"{key}_argument") is None:
        stored = {name: value for name, value in stored.items() if name not in given}
    saved: Mapping[str, object] = (
        decode(stored, cls) if hparams_file is None else _read_hparams(any_path("hparams_file", hparams_file))
    )
    unknown = [name for name, value in saved.items() if is_from_environment(value)]
    saved = {name: value for name, value in saved.items() if name not in unknown}
    if state.get(f"{key}_type") == "omegaconf":
        from omegaconf import OmegaConf

        saved = OmegaConf.create(escape_interpolations(saved))
    elif containers := [name for name in state.get(f"{key}_containers") or () if name in saved]:
        from omegaconf import OmegaConf

        saved.update({name: OmegaConf.create(escape_interpolations(saved[name])) for name in containers})
    arguments = init_arguments(cls, saved, state.get(f"{key}_argument"), given)
    _point_out_misspelt(cls, given)
    omitted = [*(state.get(f"omitted_{key}") or ()), *unknown]
    try:
        built = cls(**arguments)
    except TypeError as error:
        reason = f" {_reason_for(omitted, unknown)}." if omitted else ""
        raise CheckpointError(
            f"{cls.__name__} cannot be built with the arguments {sorted(arguments)}: {error}.{reason} "
            "Pass what is missing to load_from_checkpoint, or call save_hyperparameters() in __init__."
        ) from error
    missing = [name for name in omitted if name not in arguments and name not in given]
    if missing:
        warnings.warn(
            f"The arguments {missing} of {cls.__name__} have their defaults now: {_reason_for(missing, unknown)}; pass "
            "them to load_from_checkpoint.",
            stacklevel=5,
        )
    return built


def _reason_for(names: Sequence[str], from_environment: Sequence[str]) -> str:
    """Return why hyper-parameters are not in a checkpoint."""
    read = [name for name in names if name in from_environment]
    if not read:
        return f"{list(names)} could not be stored as JSON"
    rest = [name for name in names if name not in read]
    first = f"{read} came from the environment, whose content is not stored"
    return f"{first}, and {rest} could not be stored as JSON" if rest else first


def _read_hparams(path: AnyPath) -> dict[str, object]:
    """Read hyper-parameters from YAML, or from the CSV files (``key,value``) that Lightning reads."""
    if path.suffix not in (".yaml", ".yml", ".csv"):
        raise ConfigError(f"hparams_file must end with .yaml, .yml or .csv, got {str(path)!r}; convert it.")
    try:
        text = read_regular(at_hand(path), _LARGEST_HPARAMS).decode("utf-8")
        if path.suffix == ".csv":
            rows = csv.DictReader(io.StringIO(text, newline=""))
            hparams = {row["key"]: _parse_literal(row["value"]) for row in rows}
        else:
            import yaml

            check_yaml(text, str(path), _MOST_HPARAMS)
            hparams = dict(yaml.safe_load(text) or {})
        return {name: with_marks(value) for name, value in hparams.items()}
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can make a reader raise anything
        raise ConfigError(
            f"hparams_file={str(path)!r} must hold names and values, found {format_as_line(str(error))}; repair it."
        ) from None


def _parse_literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _target_device(map_location: MapLocation) -> torch.device:
    """Return the device for a module whose weights were read on the CPU."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    storage = map_location(torch.empty(1).untyped_storage(), "cpu")
    return torch.device("cpu") if storage is None else torch.device(storage.device)
