"""Table of checkpoints: those below a folder by age, with the step, score and place of each among the best."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import EchelonError
from ..checkpoint.atomic_folder import unfinished
from ..checkpoint.finding import FoundCheckpoint, list_checkpoints
from ..checkpoint.manifest import is_checkpoint, read_values


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


def folders_below(folder: str | Path) -> list[Path]:
    """Return a folder, and those below it that are not inside a checkpoint."""
    found = []
    for place, names, _ in os.walk(folder):
        path = Path(place)
        names[:] = sorted(name for name in names if not name.startswith(".") and not is_checkpoint(path / name))
        found.append(path)
    return found


def listed(folder: str | Path) -> list[ListedCheckpoint]:
    """Return the checkpoints below a folder: folder by folder, in each the oldest first."""
    rows = []
    for place in folders_below(folder):
        found = list_checkpoints(place)
        states = [_run_state(checkpoint) for checkpoint in found]
        best = next((names for names in reversed([{*_best_in(state)} for state in states]) if names), set())
        for checkpoint, state in zip(found, states, strict=True):
            files = checkpoint.manifest.files.values() if checkpoint.manifest is not None else ()
            step = state.get("loop", {}).get("global_step")
            rows.append(
                ListedCheckpoint(
                    os.path.relpath(checkpoint.path, folder),
                    checkpoint.saved_at,
                    sum(file.size for file in files),
                    checkpoint.fault,
                    step if isinstance(step, int) else None,
                    dict(_scores_in(state, checkpoint.path.name)),
                    checkpoint.path.name in best,
                )
            )
    return rows


def left_unfinished(folder: str | Path) -> list[Path]:
    """Return the writes below a folder that have not ended."""
    return [path for place in folders_below(folder) for path in unfinished(place)]


def _run_state(checkpoint: FoundCheckpoint) -> dict[str, Any]:
    """Return what a Trainer has saved of its loop and callbacks; empty where there is none, or it is damaged."""
    if checkpoint.manifest is None:
        return {}
    parts = [part for part in ("loop", "callbacks") if part in checkpoint.manifest.parts]
    try:
        state = read_values(checkpoint.path) if parts else {}
    except EchelonError:  # `verify` says why
        return {}
    return {part: state[part] for part in parts if isinstance(state.get(part), dict)}


def _savers(state: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the metric and the state of each `ModelCheckpoint` that ranks checkpoints."""
    for key, own in state.get("callbacks", {}).items():
        if key.startswith("ModelCheckpoint(monitor='") and isinstance(own, dict):
            yield key.split("'")[1], own


def _best_in(state: Mapping[str, Any]) -> Iterator[str]:
    for _, own in _savers(state):
        if isinstance(own.get("best"), str):
            yield own["best"]


def _scores_in(state: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for metric, own in _savers(state):
        scores = own.get("scores")
        score = scores.get(name) if isinstance(scores, dict) else None
        if isinstance(score, int | float):
            yield metric, float(score)
