"""Reader of the file that Weights & Biases keeps of a run on disk, for the points that the run has logged."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_BLOCK: Final = 32768
_HEADER: Final = struct.Struct("<IHB")
"""The header of a chunk, as in LevelDB's log: checksum, length, kind."""
_FULL, _FIRST, _LAST = 1, 2, 4


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``run.log``, as far as they are on disk: a killed run leaves an incomplete end."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _read_records(path):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _read_records(path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    with path.open("rb") as file:
        if not file.read(_HEADER.size).startswith(b":W&B"):
            return
        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                return
            _, length, kind = _HEADER.unpack(header)
            data = file.read(length)
            if not kind or len(data) < length:  # allocated but never written
                return
            parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
            if kind in (_FULL, _LAST):
                yield b"".join(parts)
            rest = _BLOCK - file.tell() % _BLOCK
            if rest < _HEADER.size:  # too short for a header
                file.seek(rest, 1)
