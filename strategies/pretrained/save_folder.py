"""Saving of a Hugging Face folder: tensor by tensor, and complete or absent."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from torch import Tensor

from ...common.errors import CheckpointError, ConfigError
from ...common.flush import flush_to_disk
from ...common.storage import AnyPath, StorePath, send_folder
from ..state.safetensors_dtypes import CODES
from .find_folder import CONFIG, PIPELINE, SINGLE
from .saved_names import Outline
from .tensor_file import memory_of

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER: Final = "adapter_model.safetensors"
_LAST: Final = (CONFIG, ADAPTER_CONFIG, PIPELINE)
"""The files of which one makes a folder that of a model."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", re.IGNORECASE)
_FACTORS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BESIDE: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
    "*processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""The files of tokenizers and processors."""


def parse_size(size: int | str) -> int:
    """Return a number of bytes given as such, or as text such as ``"5GB"``.

    Raises:
        ConfigError: for anything else.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else size
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"max_shard_size must be a number of bytes or text such as '5GB', got {size!r}.")
    return number


def _check_replaceable(path: AnyPath) -> None:
    if path.exists() and not any((path / name).is_file() for name in _LAST):
        raise CheckpointError(f"{path} exists, and is no model's folder; choose another name, or move it away.")


@contextmanager
def _sent_folder(path: StorePath) -> Iterator[Path]:
    try:
        _check_replaceable(path)
        with tempfile.TemporaryDirectory(prefix="echelon-model-") as folder:
            yield Path(folder)
            send_folder(Path(folder), path, last=_LAST)
    except OSError as error:
        raise CheckpointError(
            f"The folder {path} could not be written ({error}); make room, or choose another one."
        ) from error


@contextmanager
def committed_folder(path: AnyPath) -> Iterator[Path]:
    """Yield a new folder beside `path`, which appears under that name once the block has ended without an error.

    For one in a store the new folder is a local one; what makes it a model's folder is sent when all else is there.

    Raises:
        CheckpointError: if it cannot be written, or if something else than such a folder has the name.
    """
    if isinstance(path, StorePath):
        with _sent_folder(path) as folder:
            yield folder
        return
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    old = temporary.with_suffix(".old")
    try:
        _check_replaceable(path)
        temporary.mkdir(parents=True)
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            flush_to_disk(entry)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"The folder {path} could not be written ({error.strerror or error}); make room, or choose another one."
        ) from error
    finally:
        for left in (temporary, old):
            with suppress(OSError):
                shutil.rmtree(left)


class TensorWriter:
    """Files of tensors in a folder, which are written one after the other, in the order of their outlines.

    Args:
        folder: an existing folder.
        outlines: all tensors.
        max_size: the most bytes of a file; a larger tensor gets a file of its own.
        name: the name of a single file; several are numbered, and get an index.
    """

    def __init__(self, folder: Path, outlines: Sequence[Outline], max_size: int, name: str = SINGLE) -> None:
        self._folder = folder
        shards = _split_into_shards(outlines, max_size)
        stem, number = name.removesuffix(".safetensors"), len(shards)
        names = [name] if number == 1 else [f"{stem}-{at + 1:05}-of-{number:05}.safetensors" for at in range(number)]
        self._left = [(folder / file, list(shard)) for file, shard in zip(names, shards, strict=True)]
        if number > 1:
            total = {
                "total_size": sum(outline.num_bytes for outline in outlines),
                "total_parameters": sum(outline.shape.numel() for outline in outlines),
            }
            places = {outline.name: file.name for file, shard in self._left for outline in shard}
            write_json(folder / f"{name}.index.json", {"metadata": total, "weight_map": dict(sorted(places.items()))})

    def write(self, values: Iterable[tuple[Outline, Tensor]]) -> None:
        """Write the values of all tensors, in their order."""
        iterator = iter(values)
        for path, shard in self._left:
            with path.open("wb") as file:
                file.write(_make_header(shard))
                for outline in shard:
                    found, tensor = next(iterator)
                    assert found == outline and tensor.shape == outline.shape and tensor.dtype == outline.dtype
                    file.write(memory_of(tensor))
                    del tensor
        assert next(iterator, None) is None


def _split_into_shards(outlines: Sequence[Outline], max_size: int) -> list[list[Outline]]:
    shards: list[list[Outline]] = [[]]
    size = 0
    for outline in outlines:
        if shards[-1] and size + outline.num_bytes > max_size:
            shards.append([])
            size = 0
        shards[-1].append(outline)
        size += outline.num_bytes
    return shards


def _make_header(outlines: Sequence[Outline]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for outline in outlines:
        begin, end = end, end + outline.num_bytes
        entries[outline.name] = {
            "dtype": CODES[outline.dtype], "shape": list(outline.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write an object as JSON, as transformers does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy the files of tokenizers and processors from one folder to another, which keeps those that it has."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
