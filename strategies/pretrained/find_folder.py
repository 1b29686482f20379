"""Folder of a pretrained model: on this machine, or brought by huggingface_hub where an id is given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...common.errors import CheckpointError, ConfigError, MissingDependencyError
from ...common.storage import AnyPath, StorePath, any_path, node_copy
from ..state.regular_file import read_regular
from ..state.sources import TensorSource
from .tensor_file import TensorFile

SINGLE: Final = "model.safetensors"
INDEX: Final = f"{SINGLE}.index.json"
DIFFUSION: Final = "diffusion_pytorch_model.safetensors"
"""The file of weights of a model of diffusers."""
PIPELINE: Final = "model_index.json"
"""The file that makes a folder of models a pipeline of diffusers, whose parts it names."""
CONFIG: Final = "config.json"
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LARGEST_JSON: Final = 100_000_000
_PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WANTED: Final = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]


def find_folder(folder_or_id: str | AnyPath) -> Path:
    """Return the folder with this path, or that of a model of the hub with this id, which is brought if needed.

    Of a URL it is a copy, which all processes of a node share.

    Raises:
        CheckpointError: if there is no such folder, or the hub does not have the model or cannot be reached.
        MissingDependencyError: for an id, without huggingface_hub.
    """
    path = any_path("folder", folder_or_id)
    if isinstance(path, StorePath):
        return _from_store(path)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.exists():
        raise _of_gguf(path.parent, path.name)
    if path.suffix == ".gguf" and path.parent.is_dir():
        found = ", ".join(sorted(file.name for file in path.parent.glob("*.gguf"))[:5]) or "no .gguf file"
        raise CheckpointError(
            f"There is no file {path}; {path.parent} has {found}; give from_pretrained the name of one as gguf_file."
        )
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds it, with its {SINGLE} or {INDEX}.")
    if not isinstance(folder_or_id, str) or not _ID.fullmatch(folder_or_id):
        entries = [entry for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        near = [entry.name for entry in entries if not entry.name.startswith(("_", "."))]
        inside = f"; {path.parent} has {', '.join(sorted(near)[:5])}" if near else ""
        raise CheckpointError(f"There is no folder {path}{inside}; give one that save_pretrained has written.")
    return _from_hub(folder_or_id)


def _from_store(path: StorePath) -> Path:
    try:
        return node_copy(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds nothing; give the URL of a model's folder.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check the store, or give another folder.") from error


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise MissingDependencyError(
            f"{name!r} is no folder here, and as the id of a model on the hub it needs huggingface_hub; "
            "install it, or give a folder."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except LocalEntryNotFoundError as error:  # also without a network, and with HF_HUB_OFFLINE
        raise CheckpointError(
            f"{name!r} is no folder here, and as the id of a model on the hub it is not in this machine's cache, and "
            f"the hub cannot be reached ({_first_line(error)}); download it where there is a network, and give the "
            "folder."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is no folder here, and the hub does not hand out a model of this id ({_first_line(error)}); "
            "correct it, or give a folder."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def open_sources(folder: Path) -> dict[str, TensorSource]:
    """Return the tensors of a folder by their names in its files, of which only the headers are read.

    Raises:
        CheckpointError: for a folder without whole safetensors files.
    """
    single = DIFFUSION if any(folder.glob(f"{DIFFUSION}*")) and not any(folder.glob(f"{SINGLE}*")) else SINGLE
    index = f"{single}.index.json"
    if (folder / index).is_file():
        names = _read_index(folder / index)
    elif (folder / single).is_file():
        names = dict.fromkeys(TensorFile(folder / single).sources(), single)
    else:
        raise _without_weights(folder)
    sources: dict[str, TensorSource] = {}
    for file in sorted(set(names.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} lacks {file}, which its {index} names; copy the folder again.")
        sources |= TensorFile(folder / file).sources()
    lacking = [name for name in names if name not in sources]
    if lacking:
        raise CheckpointError(
            f"No file of {folder} holds {', '.join(lacking[:3])}, which its {index} names; copy the folder again."
        )
    return sources


def _read_index(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(v, str) and Path(v).name == v for v in names.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files in its folder; copy the folder again.")
    return names


def _without_weights(folder: Path) -> CheckpointError:
    if any((folder / name).exists() for name in _PICKLED):
        return CheckpointError(
            f"{folder} holds {_PICKLED[0]}, a pickle, which may run code when it is read; convert it once with "
            "from_pretrained(...) and save_pretrained(...), if you trust its author."
        )
    if (folder / PIPELINE).is_file():
        parts = [name for name in _parts_of(folder) if any((folder / name).glob("*.safetensors*"))]
        return CheckpointError(
            f"{folder} is a pipeline of diffusers, whose models lie below it; give the folder of one of them: "
            f"{', '.join(str(folder / name) for name in parts) or 'it has none'}."
        )
    if (folder / "adapter_config.json").exists():
        return CheckpointError(
            f"{folder} holds an adapter, not a model; load the base model that its adapter_config.json names, and the "
            "adapter with peft.PeftModel.from_pretrained."
        )
    files = sorted(folder.glob("*.gguf"))
    if files:
        return _of_gguf(folder, files[0].name)
    inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
    return CheckpointError(
        f"{folder} holds neither {SINGLE} nor {INDEX}, but {inside}; give a folder that save_pretrained has written."
    )


def _of_gguf(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / name} is a file of GGUF, which is read as a whole: call "
        f"from_pretrained({str(folder)!r}, gguf_file={name!r}) in configure_model, or convert it once to a folder, as "
        "examples/finetune.py does."
    )


def pipeline_of(folder: Path) -> Path | None:
    """Return the pipeline of diffusers of which a folder is a part; None if it is not."""
    above = folder.absolute().parent
    return above if (above / PIPELINE).is_file() and folder.name in _parts_of(above) else None


def _parts_of(pipeline: Path) -> list[str]:
    entries = read_json(pipeline / PIPELINE).items()
    return [name for name, value in entries if isinstance(value, list) and (pipeline / name).is_dir()]


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: if it cannot be read, or is none.
    """
    try:
        content = json.loads(read_regular(path, _LARGEST_JSON))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); copy it again.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object; copy it again.")
    return content


def config_of(folder: Path) -> Mapping[str, Any]:
    """Return the content of a folder's config.json; an empty mapping without one."""
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def check_dtype(dtype: object) -> torch.dtype | None:
    """Return a dtype given as such or by name, such as ``"bfloat16"``.

    Raises:
        ConfigError: if it is none of floating point.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype must be a dtype of floating point such as torch.bfloat16, got {dtype!r}.")
    return found
