"""PredictionFile: the predictions of a run in one file, a row per sample, in the format given by its suffix."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ....callbacks.prediction_writer import BasePredictionWriter
from ....callbacks.run import Run
from ....common.errors import ConfigError, ModuleError
from ....common.storage import StorePath, any_path, copy_out
from ....strategies.distributed.nested import named_leaves
from ....strategies.state.lazy_tensor import Block
from ...checkpoint.safetensors_file import write_tensors

_WHOLE: Final = "prediction"
"""The name of a prediction that is one tensor."""


class PredictionFile(BasePredictionWriter):
    """Write the predictions of all ranks, in dataset order.

    Args:
        path: the file, or its URL; ``.jsonl`` has an object for each sample, ``.csv`` a line; ``.safetensors`` has one
            tensor for each name that ``predict_step`` returns (``prediction`` if it returns a tensor).

    Raises:
        ConfigError: for another suffix, or a folder that does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__("epoch")
        self.path = any_path("--output", path)
        if self.path.suffix not in _WRITERS:
            raise ConfigError(
                f"--output={str(path)!r} must end with one of {', '.join(_WRITERS)}, got {self.path.suffix!r}; the "
                "suffix chooses the format."
            )
        if not (isinstance(self.path, StorePath) or self.path.parent.is_dir()):
            raise ConfigError(f"--output={str(path)!r} is in a folder that does not exist; create {self.path.parent}.")

    def write_on_epoch_end(
        self, trainer: Run, module: nn.Module, predictions: Sequence[Any], batch_indices: Sequence[object]
    ) -> None:
        several = len(batch_indices) > 1
        batches = list(chain.from_iterable(predictions)) if several else list(predictions)
        if isinstance(self.path, StorePath):
            with copy_out(self.path) as file:
                _WRITERS[self.path.suffix](file, _join_columns(batches))
            return
        # a file under the final name is always complete
        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            _WRITERS[self.path.suffix](partial, _join_columns(batches))
            partial.replace(self.path)
        except OSError as error:
            raise ConfigError(
                f"--output={str(self.path)!r} cannot be written ({error.strerror}); give another path."
            ) from error
        finally:
            partial.unlink(missing_ok=True)


def _join_columns(batches: Sequence[object]) -> dict[str, Tensor]:
    """Return the tensors in all batches by name, each with a row per sample.

    Raises:
        ModuleError: for predictions without rows, or with different names in different batches.
    """
    rows: dict[str, list[Tensor]] = {}
    for batch in batches:
        found = {_column_name(name): value for name, value in named_leaves(batch)}
        for name, value in found.items():
            if not isinstance(value, Tensor) or not value.dim():
                raise ModuleError(
                    "predict_step must return tensors with a row for each sample for --output to write, got "
                    f"{value!r:.60} as {name!r}; write other values with a BasePredictionWriter."
                )
            rows.setdefault(name, []).append(value)
        if found.keys() != rows.keys():
            raise ModuleError(
                f"predict_step must return the same names for each batch, got {sorted(found)} after {sorted(rows)}; "
                "write such predictions with a BasePredictionWriter."
            )
    return {name: torch.cat(parts) for name, parts in rows.items()}


def _column_name(name: str) -> str:
    """Return a name such as ``logits`` or ``scores.0`` for ``['logits']`` or ``['scores'][0]``."""
    return name.replace("']['", ".").replace("'][", ".").strip("[]'").replace("][", ".") or _WHOLE


def _iterate_rows(columns: Mapping[str, Tensor]) -> Iterator[list[object]]:
    return map(list, zip(*(column.tolist() for column in columns.values()), strict=True))


def _write_jsonl(path: Path, columns: Mapping[str, Tensor]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in _iterate_rows(columns):
            print(json.dumps(dict(zip(columns, row, strict=True))), file=file)


def _write_csv(path: Path, columns: Mapping[str, Tensor]) -> None:
    flat = {
        name if column.dim() == 1 else f"{name}.{place}": values
        for name, column in columns.items()
        for place, values in enumerate(column.reshape(len(column), -1).unbind(1))
    }
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(flat)
        writer.writerows(_iterate_rows(flat))


def _write_safetensors(path: Path, columns: Mapping[str, Tensor]) -> None:
    write_tensors(path, {name: Block.whole(column.contiguous()) for name, column in columns.items()})


_WRITERS: Final[Mapping[str, Callable[[Path, Mapping[str, Tensor]], None]]] = {
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
    ".safetensors": _write_safetensors,
}
