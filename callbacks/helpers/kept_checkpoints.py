"""KeptCheckpoints: the checkpoints that retention keeps, with their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Self

from ...common.errors import ConfigError
from ...common.storage import as_path
from ...strategies.state.schema import NUMBER, TEXT
from ..run import Run
from .checkpoint_name import EXTENSION
from .monitored import MonitoredMetric

STATE: Final = {
    "dirpath": TEXT,
    "scores": {TEXT: (NUMBER, None)},
    "newest": TEXT,
    "best": TEXT,
    "is_pending": bool,
    "replaced": [TEXT],
}
"""The schema of what ModelCheckpoint saves."""


@dataclass(frozen=True)
class KeptCheckpoints:
    """The checkpoints on disk, by name in their folder; replaced as a whole, so a failed save changes nothing."""

    scores: dict[str, float] = field(default_factory=dict)
    """The top k, in the order in which they were saved."""
    newest: str = ""
    """The checkpoint that ``last.ckpt`` links to: one of the top k, or one that is kept only for this."""

    @classmethod
    def loaded(cls, scores: Mapping[str, float | None], newest: str, extension: str = EXTENSION) -> Self:
        """Return what was saved (None: a score that is not finite), without names that point outside the folder."""
        own = {name: scores[name] for name in own_names(scores, extension)}
        finite = {name: float("nan") if score is None else float(score) for name, score in own.items()}
        return cls(finite, newest if own_names([newest], extension) else "")

    def of_this_run(self, trainer: Run, folder: str) -> Self:
        """Return those in the folder that this run, or one that it resumes, has written."""
        is_own = {name: is_own_checkpoint(trainer, folder, name) for name in self.names}
        scores = {name: score for name, score in self.scores.items() if is_own[name]}
        return type(self)(scores, self.newest if is_own.get(self.newest) else "")

    @property
    def names(self) -> list[str]:
        """The names of all checkpoints that are kept."""
        return [name for name in dict.fromkeys((*self.scores, self.newest)) if name]

    @property
    def is_newest_unranked(self) -> bool:
        """Whether the newest is kept only as such."""
        return self.newest not in ("", *self.scores)

    def ranked(self, metric: MonitoredMetric) -> list[str]:
        """Return the names of the top k, best first."""
        return sorted(self.scores, key=lambda name: metric.rank_of(self.scores[name]), reverse=True)

    def scores_with_room(self, score: float | None, k: int, metric: MonitoredMetric) -> dict[str, float] | None:
        """Return the scores that stay in the top k (-1: all) beside a new one; None if that one is not in it."""
        if score is None:
            return None
        if k == -1 or len(self.scores) < k:
            return dict(self.scores)
        worst = min(self.scores, key=lambda name: metric.rank_of(self.scores[name]))
        if not metric.is_better(score, self.scores[worst]):
            return None
        return {name: kept for name, kept in self.scores.items() if name != worst}


def check_kept(save_top_k: int, monitor: str | None, save_last: object, frozen: object = None) -> None:
    """Check the arguments that say which checkpoints are kept, and with which weights.

    Raises:
        ConfigError: for an invalid one.
    """
    if save_top_k < -1:
        raise ConfigError(
            f"save_top_k={save_top_k} is not a number of checkpoints. Must be >= -1: 0 for none, -1 for all."
        )
    if monitor is None and save_top_k > 1:
        raise ConfigError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid combination: the top "
            f"{save_top_k} are ranked by a metric; set monitor, or keep the newest with monitor='step', mode='max'."
        )
    if save_last not in (None, True, False, "link"):
        raise ConfigError(f"save_last must be True, False or 'link', got {save_last!r}.")
    if frozen not in (None, "keep", "omit"):
        raise ConfigError(
            f"frozen must be 'keep' or 'omit', got {frozen!r}; leave it out to omit only the base of adapters that "
            "load_pretrained has read."
        )


def is_own_checkpoint(trainer: Run, folder: str, name: str) -> bool:
    """Return whether the run has written the checkpoint of this name, and no link points outside the folder."""
    path = as_path(folder) / name
    try:
        inside, root = path.parent.resolve(), as_path(folder).resolve()
    except (OSError, RuntimeError):  # circular links
        return False
    return root in (inside, *inside.parents) and trainer.wrote_checkpoint(path)


def own_names(names: Iterable[str], extension: str = EXTENSION) -> list[str]:
    """Return the loaded names that a callback could have saved: those of checkpoints inside its folder."""
    paths = {name: PurePath(name) for name in names}
    return [
        name
        for name, path in paths.items()
        if path.name.endswith(extension) and not path.is_absolute() and ".." not in path.parts
    ]


def is_there(path: str) -> bool:
    """Return whether something is at a path or URL; a failing disk, or a store that does not answer, means no."""
    try:
        return as_path(path).exists()
    except OSError:
        return False
