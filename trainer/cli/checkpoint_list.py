"""Table of checkpoints: those below a folder by age, with the step, score and place of each among the best."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...common.errors import CheckpointError, EchelonError
from ...common.storage import AnyPath, StorePath, as_path
from ..checkpoint.atomic_folder import list_unfinished
from ..checkpoint.files import MappedFile, explain_os_error, is_one_file, pieces_of, while_it_stays
from ..checkpoint.finding import FoundCheckpoint, list_checkpoints
from ..checkpoint.in_store.store_folder import begun_in
from ..checkpoint.manifest import MANIFEST, STATE, is_checkpoint, read_manifest, read_object
from ..checkpoint.on_nodes.on_disk import files_on_other_nodes

_EXTENSION: Final = ".ckpt"
"""That of what a `ModelCheckpoint` saves; its module imports torch, which takes two seconds."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint with what its run says of it."""

    name: str
    """Its path below the folder that was asked for."""
    saved_at: str
    size: int
    """In bytes."""
    fault: str
    """The reason why it cannot be used; empty if its manifest can."""
    step: int | None = None
    scores: Mapping[str, float] | None = None
    """By the metric that a `ModelCheckpoint` monitors."""
    is_best: bool = False
    """Whether the newest checkpoint of its folder that knows a best one names it."""
    elsewhere: int = 0
    """How many of its files are on the disks of other nodes, if nodes shared no folder."""


def folders_below(folder: str | AnyPath) -> Sequence[AnyPath]:
    """Return a folder, and those below it that are not inside a checkpoint."""
    root = as_path(folder)
    if isinstance(root, StorePath):
        return _folders_in_store(root)
    found = []
    for place, names, _ in os.walk(root):
        path = Path(place)
        names[:] = sorted(name for name in names if not name.startswith(".") and not is_checkpoint(path / name))
        found.append(path)
    return found


def list_below(folder: str | AnyPath) -> list[ListedCheckpoint]:
    """Return the checkpoints below a folder: folder by folder, in each the oldest first."""
    rows = []
    for place in folders_below(folder):
        found = list_checkpoints(place)
        states = [_run_state(checkpoint) for checkpoint in found]
        best = next((names for names in reversed([{*_best_in(state)} for state in states]) if names), set())
        for checkpoint, state in zip(found, states, strict=True):
            files = checkpoint.manifest.files if checkpoint.manifest is not None else {}
            elsewhere = files_on_other_nodes(checkpoint.path, checkpoint.manifest)
            step = state.get("loop", {}).get("global_step")
            rows.append(
                ListedCheckpoint(
                    _name_below(as_path(folder), checkpoint.path),
                    checkpoint.saved_at,
                    sum(file.size for name, file in files.items() if name not in elsewhere),
                    checkpoint.fault,
                    step if isinstance(step, int) else None,
                    dict(_scores_in(state, checkpoint.path.name)),
                    checkpoint.path.name in best,
                    len(elsewhere),
                )
            )
    return rows


def _name_below(folder: AnyPath, path: AnyPath) -> str:
    if isinstance(folder, Path) and isinstance(path, Path):
        return str(path.relative_to(folder))
    return str(path).removeprefix(str(folder)).lstrip("/")


def left_unfinished(folder: str | AnyPath) -> list[AnyPath]:
    """Return the writes below a folder that have not ended."""
    places = folders_below(folder)
    return [
        path for place in places for path in (list_unfinished(place) if isinstance(place, Path) else begun_in(place))
    ]


def _folders_in_store(folder: StorePath) -> list[StorePath]:
    inside = [folder / entry.name for entry in folder.store.list(folder) if entry.is_folder]
    below = [path for path in inside if path.suffix != _EXTENSION and not path.name.startswith(".")]
    return [folder, *(found for path in below if not is_checkpoint(path) for found in _folders_in_store(path))]


def _run_state(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    """Return what a Trainer has saved of its loop and callbacks; empty where there is none, or it is damaged."""
    if checkpoint.manifest is None:
        return {}
    parts = [part for part in ("loop", "callbacks") if part in checkpoint.manifest.parts]
    try:
        state = _values_of(checkpoint.path, parts) if parts else {}
    except EchelonError:  # `verify` says why
        return {}
    return {part: state[part] for part in parts if isinstance(state.get(part), dict)}


def _values_of(path: AnyPath, parts: Sequence[str]) -> dict[str, object]:
    """Return the JSON values of parts, without comparing them with their hash, and on this machine without torch."""
    if isinstance(path, StorePath):
        from ..checkpoint.loading import load

        return load(path, parts=parts, verify=False)
    local = path

    def read(held: int | None) -> dict[str, Any]:
        files = read_manifest(local, held).files
        if STATE not in files:
            raise CheckpointError(f"{local / MANIFEST} does not list {STATE}; use another checkpoint.")
        if not is_one_file(local, held):
            return read_object(MappedFile(local / STATE, held=held))
        return read_object(pieces_of(MappedFile(local, is_private=False, held=held), files)[STATE])

    try:
        return while_it_stays(local, read)
    except OSError as error:
        raise CheckpointError(f"{local} cannot be read: {explain_os_error(error)}.") from error


def _ranking_callbacks(state: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the metric and the state of each `ModelCheckpoint` that ranks checkpoints."""
    for key, own in state.get("callbacks", {}).items():
        if key.startswith("ModelCheckpoint(monitor='") and isinstance(own, dict):
            yield key.split("'")[1], own


def _best_in(state: Mapping[str, object]) -> Iterator[str]:
    for _, own in _ranking_callbacks(state):
        if isinstance(own.get("best"), str):
            yield own["best"]


def _scores_in(state: Mapping[str, object], name: str) -> Iterator[tuple[str, float]]:
    for metric, own in _ranking_callbacks(state):
        scores = own.get("scores")
        score = scores.get(name) if isinstance(scores, dict) else None
        if isinstance(score, int | float):
            yield metric, float(score)
