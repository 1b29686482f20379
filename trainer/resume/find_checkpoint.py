"""Looking up the checkpoint that ``ckpt_path`` refers to, and reading it on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...callbacks.helpers.loggers import run_folder
from ...callbacks.model_checkpoint import ModelCheckpoint
from ...callbacks.run import Logger
from ...common.errors import CheckpointError, ConfigError, EchelonError
from ...common.storage import AnyPath, StorePath, as_path, check_store, home_of, is_url
from ...strategies import Strategy
from .. import checkpoint
from ..checkpoint.files import explain_os_error
from ..checkpoint.in_store.links import link_target
from ..checkpoint.on_nodes.parts import READ_IN_PART
from ..checkpoint.saved_state import check_saved
from ..loggers.base import CLAIM


def find_checkpoint(
    ckpt_path: str | AnyPath | None,
    loggers: Sequence[Logger],
    callbacks: Sequence[ModelCheckpoint],
    root_dir: str | Path,
    *,
    to_resume: bool,
    has_fitted: bool = False,
    takes_parts: bool = False,
) -> AnyPath | None:
    """Return the checkpoint that ``ckpt_path`` refers to; None without one, and for ``last`` if there is none yet.

    ``best`` is that of the first `ModelCheckpoint`; if the trainer has not fitted (`has_fitted`), that of the run that
    saved the last checkpoint. ``last`` is the newest valid one in their folders, and in those of all runs with the
    loggers' names, or in `root_dir` without loggers; with `to_resume`, the newest that holds more than weights; with
    `takes_parts`, other nodes may have parts of it.

    Raises:
        ConfigError: for ``best`` if none was saved.
        CheckpointError: if the path is missing or not a checkpoint, or all candidates for the last one are damaged.
    """
    if ckpt_path is None:
        return None
    if is_url(ckpt_path):
        check_store(StorePath.parse(str(ckpt_path)), "ckpt_path", writes=False)
    best = next((callback.best_model_path for callback in callbacks), "") if ckpt_path == "best" else ""
    if best:
        return checkpoint.resolve_checkpoint(best)
    if ckpt_path == "best" and has_fitted:
        raise _no_best([])
    folders = folders_of_runs(loggers, callbacks, root_dir)
    if ckpt_path == "best":
        return _best_of_last_run(folders, takes_parts=takes_parts)
    return checkpoint.resolve_checkpoint(
        ckpt_path, *folders, part="loop" if to_resume else None, takes_parts=takes_parts
    )


def folders_of_runs(loggers: Sequence[Logger], callbacks: Sequence[ModelCheckpoint], root_dir: str | Path) -> list[str]:
    """Return the checkpoint folders of these callbacks and of all runs with the loggers' names, or in `root_dir`."""
    folders = {callback.dirpath for callback in callbacks if callback.dirpath}
    if not loggers:
        folders.add(str(home_of(root_dir) / "checkpoints"))
    for logger in loggers:
        folders.update(_folders_of_runs(home_of(run_folder(logger, root_dir).parent)))
    return sorted(folders)


def _folders_of_runs(parent: AnyPath) -> list[str]:
    """Return the checkpoint folders of all runs below `parent` that this user may read."""
    try:
        found = list(map(str, parent.glob("*/checkpoints")))
        return found if isinstance(parent, Path) else [*found, *_unlisted_folders(parent, found)]
    except OSError as error:
        raise CheckpointError(
            f"The runs in {parent} cannot be searched for the last checkpoint: {explain_os_error(error)}; or give "
            "its path as ckpt_path."
        ) from error


def _unlisted_folders(parent: StorePath, found: Sequence[str]) -> Iterator[str]:
    """Yield the checkpoint folders of runs that the store does not list yet, by their numbers, which have no gaps."""
    numbers = [re.search(r"version_(\d+)/checkpoints$", path) for path in found]
    number = max((int(match[1]) for match in numbers if match), default=-1) + 1
    while (parent / f"version_{number}" / CLAIM).is_file():
        yield str(parent / f"version_{number}" / "checkpoints")
        number += 1


def _best_of_last_run(folders: Sequence[str], *, takes_parts: bool) -> AnyPath:
    """Return the best checkpoint of the newest run, as its first `ModelCheckpoint` saved it in the last checkpoint.

    Raises:
        ConfigError: if there is none.
    """
    last = checkpoint.newest_valid(*folders, part="callbacks", takes_parts=takes_parts)
    states = {} if last is None else checkpoint.load(last, parts=["callbacks"], verify=False)["callbacks"]
    for key, state in states.items():
        name = state.get("best") if key.startswith(ModelCheckpoint.__name__) and isinstance(state, dict) else None
        if last is None or not isinstance(name, str) or not name:
            continue
        here = last.parent / Path(name).name  # the folder may have been moved since
        best = here if here.exists() else as_path(str(state.get("dirpath"))) / Path(name).name
        return checkpoint.resolve_checkpoint(best) or best
    raise _no_best(folders)


def _no_best(folders: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"ckpt_path='best' needs a checkpoint of a ModelCheckpoint, got none in {list(folders)}: "
        "`ModelCheckpoint` is not configured, or is not configured to save the best; fit with one, or pass a path."
    )


def read_checkpoint(
    path: AnyPath,
    strategy: Strategy,
    *,
    verify: bool = True,
    parts: Collection[str] | None = None,
    large: Collection[str] = READ_IN_PART,
    checked: Callable[[dict[str, object], str], None] = check_saved,
) -> dict[str, Any]:
    """Return the state in a checkpoint; each rank reads what it needs. Collective: every rank calls it.

    With `verify`, the ranks of each node divide the hashes among themselves, and all ranks learn the result. A link,
    such as last.ckpt, is followed once, on rank 0, and again if the checkpoint was deleted meanwhile.

    Args:
        path: the checkpoint.
        strategy: the strategy of the ranks.
        verify: whether to compare the hashes.
        parts: the entries to read; by default all.
        large: the entries of which a rank may need only a part.
        checked: raises if the state is not as it was saved.

    Raises:
        CheckpointError: on every rank, if the checkpoint is missing or damaged on any rank.
    """
    share = strategy.local_rank, strategy.ranks.environment.local_world_size
    lazy = large if strategy.world_size > 1 else ()
    target = _follow_link(path, strategy)
    while True:
        try:
            with _make_readable(target or path, strategy, lazy) as place, strategy.ranks.all.fail_together():
                is_whole = verify or place != (target or path)  # what other nodes have was not looked at
                state = checkpoint.load(place, parts=parts, lazy=lazy, verify=is_whole, share=share, wrapped="stored")
                checked(state, str(path))
        except EchelonError:  # on every rank
            before, target = target, _follow_link(path, strategy)
            if target == before:
                raise
        else:
            return state


@contextmanager
def _make_readable(path: AnyPath, strategy: Strategy, lazy: Collection[str]) -> Iterator[AnyPath]:
    """Yield where a checkpoint can be read on this node; see `SpreadCheckpoint.readable`. Collective."""
    supervisor = strategy.launcher.supervisor
    is_in_memory = supervisor is not None and path.parent == supervisor.snapshots.folder  # each node has what it needs
    if is_in_memory or isinstance(path, StorePath) or not strategy.ranks.all.spans_nodes:
        yield path
        return
    from ..checkpoint.on_nodes.gathering import SpreadCheckpoint

    spread = SpreadCheckpoint(path, strategy.ranks.all)
    if not spread.exists:
        yield path
        return
    with spread.readable(strategy.mesh_axes, lazy) as place:
        yield place


def last_across_nodes(
    found: AnyPath | None, strategy: Strategy, folders: Callable[[], Sequence[str]], part: str | None
) -> AnyPath | None:
    """Return the newest checkpoint that the disks of all nodes together have; if nodes share them, the one found.

    The node of rank 0 then has at least a part of it. Collective: every rank calls it.

    Args:
        found: the newest on the node of rank 0; None without one.
        strategy: the strategy of the ranks.
        folders: returns, on rank 0, where checkpoints may be.
        part: what the state in it must have; None for any.

    Raises:
        CheckpointError: if there are checkpoints, and no node has a part of each.
    """
    ranks = strategy.ranks.all
    if isinstance(found, StorePath) or not ranks.spans_nodes:
        return found
    from ..checkpoint.on_nodes.gathering import newest_complete

    group = ranks.process_group
    assert group is not None
    places = [place for place in ranks.on_first_rank(folders) if not is_url(place)]
    with ranks.fail_together():
        own = {
            str(one.path.absolute()): one.saved_at
            for one in (checkpoint.list_checkpoints(*places) if group.is_first_on_node else ())
            if one.manifest is not None and (part is None or part in one.manifest.parts)
        }
    of_ranks = ranks.all_gather_object(own)
    known = {path: saved_at for of_rank in reversed(of_ranks) for path, saved_at in of_rank.items()}
    chosen = "" if found is None else str(found.absolute())
    # what rank 0 has and did not choose, though it is newer, is damaged there
    limit = known.get(chosen, ""), chosen
    newest_first = sorted(known, key=lambda path: (known[path], path), reverse=True)
    usable = [path for path in newest_first if path not in of_ranks[0] or (known[path], path) <= limit]
    newest = newest_complete(list(map(as_path, usable)), ranks)
    return found if newest is None or str(newest) == chosen else newest


def _follow_link(path: AnyPath, strategy: Strategy) -> AnyPath | None:
    """Return the checkpoint to which a link points on rank 0; None if it is none. Collective: every rank calls it."""
    return strategy.ranks.all.on_first_rank(lambda: link_target(path))
