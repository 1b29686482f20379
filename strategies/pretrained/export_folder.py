"""Export of a checkpoint as a Hugging Face folder, with the config of the model that it was trained from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...common.errors import CheckpointError, did_you_mean
from ...common.storage import AnyPath, any_path
from .find_folder import find_folder
from .libraries import model_described_by
from .save_folder import committed_folder
from .save_model import FolderSettings, write_folder
from .saved_names import SavedTensors, untied_tensors


def export_folder(
    path: AnyPath, weights: Mapping[str, Tensor], destination: AnyPath, base: str | AnyPath, settings: FolderSettings
) -> AnyPath:
    """Write the weights of a checkpoint as a folder that ``from_pretrained`` reads, one tensor in memory at a time.

    Args:
        path: the checkpoint, for errors.
        weights: its weights, which may be read only when they are used.
        destination: the folder, which is complete or absent.
        base: the folder with the model's config.json, whose tokenizer is copied.
        settings: how it is written.

    Raises:
        CheckpointError: if the weights are not those of the model that the config describes.
        MissingDependencyError: without the library of the model.
    """
    folder = find_folder(base)
    model = model_described_by(folder)
    shapes = untied_tensors(model)
    prefix = _find_prefix(list(shapes), weights, str(path), folder)
    for name, here in shapes.items():
        if weights[prefix + name].shape != here.shape:
            raise CheckpointError(
                f"{path} is not of the model that {folder} describes: {prefix + name} is "
                f"{tuple(weights[prefix + name].shape)} in it, not {tuple(here.shape)}; give the base that it was "
                "trained from."
            )
    own = {name: torch.empty_like(here, dtype=weights[prefix + name].dtype) for name, here in shapes.items()}
    tensors = SavedTensors(model, own, settings.dtype)
    with committed_folder(any_path("destination", destination)) as new:
        write_folder(new, model, tensors, lambda name: weights[prefix + name].clone(), settings, source=folder)
    return destination


def _find_prefix(names: list[str], weights: Mapping[str, Tensor], path: str, folder: Path) -> str:
    """Return what stands before the model's names in a checkpoint, which is the name of a part of a TrainModule."""
    first = names[0]
    prefixes = [name.removesuffix(first) for name in weights if name == first or name.endswith(f".{first}")]
    for prefix in prefixes:
        if all(prefix + name in weights for name in names):
            return prefix
    adapters = [name for name in weights if ".lora_" in name or "modules_to_save" in name]
    if adapters:
        raise CheckpointError(
            f"{path} holds a model with adapters, such as {adapters[0]}; write its folder while it is trained: "
            "use HuggingFaceCheckpoint, with merge_adapters=True for the merged model."
        )
    prefix = prefixes[0] if prefixes else ""
    lacking = next(name for name in names if prefix + name not in weights)
    raise CheckpointError(
        f"{path} is not of the model that {folder} describes: it lacks {prefix + lacking}."
        f"{did_you_mean(prefix + lacking, list(weights)[:50])} Give the base that it was trained from."
    )
