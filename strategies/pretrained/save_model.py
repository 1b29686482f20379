"""Saving of a model that is being trained, from its shards, as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError, ConfigError
from ...common.storage import AnyPath
from ..distributed.ranks import Ranks
from ..state.dtensor import is_dtensor
from .adapters import AdapterTensors, MergedTensors, base_of, is_adapted, write_adapter_config
from .libraries import LIBRARIES, copy_pipeline, library_of
from .save_folder import ADAPTER, TensorWriter, committed_folder, copy_beside
from .saved_names import Fetch, Outline, SavedTensors
from .whole_builds import LOADED

_KNOWN: Final = ", ".join([*(library.name for library in LIBRARIES), "peft"])


class Tensors(Protocol):
    """The tensors that a folder is to hold, and their values in the same order."""

    outlines: list[Outline]
    names: list[str]
    """The model's tensors that are fetched, in order."""

    def values(self, fetch: Fetch) -> Iterator[tuple[Outline, Tensor]]:
        """Return each tensor with its values."""


class Holder(Protocol):
    """What holds a module's tensors, possibly as shards: what a strategy has placed."""

    @property
    def ranks(self) -> Ranks:
        """The ranks."""

    def sync_replicas(self) -> object:
        """Make replicas equal, before weights are read. Collective."""

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        """Make copies of buffers equal on all ranks. Collective."""

    def whole_tensors(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return whole copies of parameters on the CPU. Collective."""


@dataclass(frozen=True)
class FolderSettings:
    """How a folder is written.

    Args:
        dtype: the dtype of floating point tensors; None for the model's.
        max_shard_size: the most bytes of a file.
        merge_adapters: whether adapters are merged into the base model, instead of being written alone.
        tokenizer: a tokenizer or processor that is saved beside the model.
    """

    dtype: torch.dtype | None = None
    max_shard_size: int = 5 * 10**9
    merge_adapters: bool = False
    tokenizer: Any = None


def find_model(module: nn.Module, part: str | None) -> tuple[str, nn.Module]:
    """Return the name and the one pretrained model, with or without adapters, in a module; or its part of that name.

    Raises:
        ConfigError: if there is none, or several.
    """
    if part is not None:
        found = {name: child for name, child in module.named_modules() if name == part}
        if not found:
            names = ", ".join(name for name, _ in module.named_children())
            raise ConfigError(f"part={part!r} is no part of {type(module).__name__}; choose one of: {names}.")
    else:
        found = {}
        for name, child in module.named_modules():
            if _is_pretrained(child) and not any(_is_in(name, outer) for outer in found):
                found[name] = child
    if len(found) != 1:
        raise ConfigError(
            f"{type(module).__name__} has {len(found)} models of {_KNOWN} ({', '.join(found) or 'none'}), and "
            "HuggingFaceCheckpoint writes one; name it by part=."
        )
    [(name, model)] = found.items()
    if not _is_pretrained(model):
        raise ConfigError(
            f"{part} is a {type(model).__name__}, without the config that a folder of Hugging Face has; save it with "
            f"echelon.export, or name a model of {_KNOWN} by part=."
        )
    return name, model


def _is_pretrained(module: nn.Module) -> bool:
    return is_adapted(module) or library_of(module) is not None


def _is_in(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def save_model(path: AnyPath, module: nn.Module, part: str | None, holder: Holder, settings: FolderSettings) -> None:
    """Write a model as a folder, on rank 0. Collective: every rank calls it.

    Args:
        path: the folder, also one in a store, which is complete or absent.
        module: the module that is trained.
        part: the name of the model in it; None for the one that there is.
        holder: what holds its tensors.
        settings: how it is written.

    Raises:
        CheckpointError: on all ranks, if it cannot be written.
    """
    name, model = find_model(module, part)
    tensors = tensors_of(model, settings)
    holder.sync_replicas()
    fetch = _Fetching(module, f"{name}." if name else "", holder, tensors.names)
    error: Exception | None = None
    if holder.ranks.environment.rank == 0:
        try:
            with committed_folder(path) as folder:
                write_folder(folder, model, tensors, fetch, settings)
        except Exception as raised:  # noqa: BLE001 - raised once the other ranks know
            error = raised
    fetch.finish()
    text = holder.ranks.all.broadcast(None if error is None else str(error))
    if error is not None:
        raise error
    if text is not None:
        raise CheckpointError(f"Rank 0 could not write {path} ({text}); see its error.")


class _Fetching:
    """Returns whole tensors by name, in the order in which all ranks gather them."""

    def __init__(self, module: nn.Module, prefix: str, holder: Holder, names: Sequence[str]) -> None:
        self._prefix, self._holder, self._names = prefix, holder, names
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        wanted = [prefix + name for name in names if prefix + name in buffers]
        self._buffers = {name: buffers[name].detach().clone() for name in wanted if not is_dtensor(buffers[name])}
        holder.sync_buffers(self._buffers)
        self._number = 0

    def __call__(self, name: str) -> Tensor:
        assert name == self._names[self._number]
        self._number += 1
        full = self._prefix + name
        if full in self._buffers:
            return self._buffers[full].cpu()
        return self._holder.whole_tensors({full: self._parameters[full]})[full]

    def finish(self) -> None:
        """Take part in gathering what has not been fetched here, on other ranks or after an error."""
        for name in self._names[self._number :]:
            self(name)


def write_folder(
    folder: Path,
    model: nn.Module,
    tensors: Tensors,
    fetch: Fetch,
    settings: FolderSettings,
    source: str | Path | None = None,
) -> None:
    """Write the files of a folder: weights, configs, and what the folder `source` has beside them.

    That is a tokenizer, or the rest of a pipeline of diffusers. By default it is the folder that `load_pretrained` has
    read.
    """
    base = base_of(model)
    source = source if source is not None else vars(base).get(LOADED)
    beside = Path(source) if source is not None and Path(source).is_dir() else None
    if is_adapted(model) and not settings.merge_adapters:
        TensorWriter(folder, tensors.outlines, sys.maxsize, ADAPTER).write(tensors.values(fetch))
        write_adapter_config(model, folder)
    else:
        library = library_of(base)
        assert library is not None
        part = folder if beside is None else copy_pipeline(beside, folder)
        most = settings.max_shard_size if library.can_be_split else sys.maxsize
        TensorWriter(part, tensors.outlines, most, library.weights).write(tensors.values(fetch))
        dtypes = (outline.dtype for outline in tensors.outlines if outline.dtype.is_floating_point)
        library.write_config(base, part, next(dtypes, torch.float32))
    if settings.tokenizer is not None:
        settings.tokenizer.save_pretrained(folder)
    elif beside is not None:
        copy_beside(beside, folder)


def tensors_of(model: nn.Module, settings: FolderSettings) -> Tensors:
    """Return what a folder of a model holds."""
    if is_adapted(model):
        return MergedTensors(model, settings.dtype) if settings.merge_adapters else AdapterTensors(model)
    return SavedTensors(model, dtype=settings.dtype)
