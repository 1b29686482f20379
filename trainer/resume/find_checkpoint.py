"""Looking up the checkpoint that ``ckpt_path`` means, and reading it on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ...callbacks.helpers.loggers import run_folder
from ...callbacks.model_checkpoint import ModelCheckpoint
from ...callbacks.run import Logger
from ...strategies import Strategy
from ...strategies.errors import CheckpointError, ConfigError, EchelonError
from .. import checkpoint

_LARGE: Final = ("model", "optimizers")
"""The entries that a rank may need only in part."""


def find_checkpoint(
    ckpt_path: str | Path | None,
    loggers: Sequence[Logger],
    callbacks: Sequence[ModelCheckpoint],
    root_dir: str,
    *,
    to_resume: bool,
) -> Path | None:
    """Return the checkpoint that ``ckpt_path`` means; None without one, and for ``last`` where there is none yet.

    ``best`` is that of the first `ModelCheckpoint`; ``last`` the newest valid one in their folders, and in those of all
    runs of the loggers' names, or in `root_dir` without loggers; `to_resume` training, the newest that holds more than
    weights.

    Raises:
        ConfigError: for ``best`` where none was saved.
        CheckpointError: if the path is absent or no checkpoint, or all that could be the last one are damaged.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "best":
        best = next((callback.best_model_path for callback in callbacks), "")
        if not best:
            raise ConfigError(
                f"ckpt_path='best' needs a checkpoint of a ModelCheckpoint, got {best!r}; fit with one, or pass a path."
            )
        return checkpoint.resolve(best)
    folders = {callback.dirpath for callback in callbacks if callback.dirpath}
    if not loggers:
        folders.add(str(Path(root_dir) / "checkpoints"))
    for logger in loggers:
        folders.update(map(str, run_folder(logger, root_dir).parent.glob("*/checkpoints")))
    return checkpoint.resolve(ckpt_path, *sorted(folders), part="loop" if to_resume else None)


def read_checkpoint(path: Path, strategy: Strategy, *, verify: bool = True) -> dict[str, Any]:
    """Return the state in a checkpoint; each rank reads what it uses. Collective: every rank calls it.

    With `verify`, the ranks of each node share in comparing the hashes, and all hear of it.

    Raises:
        CheckpointError: on every rank, if the checkpoint is absent or damaged as any of them sees it.
    """
    state: dict[str, Any] = {}
    error: EchelonError | None = None
    try:
        share = strategy.local_rank, strategy.environment.local_world_size
        lazy = _LARGE if strategy.world_size > 1 else ()
        state = checkpoint.load(path, lazy=lazy, verify=verify, share=share)
    except EchelonError as raised:
        error = raised
    faults = strategy.collectives.all_gather_object(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise CheckpointError(f"{fault} Found so on rank {rank} of {len(faults)}; look at its node.")
    return state
