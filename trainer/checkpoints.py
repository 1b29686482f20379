"""Checkpoints: the part of the trainer that writes, links and deletes the checkpoints of a run."""

from __future__ import annotations

from typing import ClassVar

from ..common.errors import CheckpointError, ConfigError
from ..common.storage import AnyPath, Pending, any_path, as_path
from .checkpoint.manifest import read_manifest
from .checkpoint.single_file import SingleFile
from .result import EndedRun, save_ended
from .resume.rollback import roll_back
from .resume.save import save_checkpoint
from .runner import Runner


class Checkpoints:
    """Checkpoints of the current or last run, in this process or on all ranks."""

    saves_single_files: ClassVar[bool] = False
    """Whether a checkpoint is one file if `save_checkpoint` is not told otherwise."""
    keeps_classes: ClassVar[bool] = False
    """Whether ``torch.load`` returns the classes among hyper-parameters in such a file, and not their names."""
    _runner: Runner

    def save_checkpoint(
        self,
        filepath: str | AnyPath,
        weights_only: bool | None = None,
        storage_options: None = None,
        *,
        wait: bool = True,
        single_file: bool | None = None,
    ) -> None:
        """Write a checkpoint at `filepath`, atomically. Collective: every rank calls it.

        With ``wait=False`` this returns once the state is copied; it is written while training continues, and a write
        error is raised at the next step boundary.

        Args:
            filepath: where to write it, a path or a URL; a checkpoint of that name is replaced.
            weights_only: leave out state that is needed only to resume.
            storage_options: must be None; only Lightning's plugins use it.
            wait: wait until it is written.
            single_file: write one file, which ``torch.load(weights_only=True)`` and Lightning read, instead of a folder
                of safetensors and JSON; a run resumes from both alike.

        Raises:
            ConfigError: for a URL that is not possible, and for `storage_options`.
            RunError: if there is no run to save.
            CheckpointError: if it cannot be written, or its state holds something that is neither a tensor nor JSON.

        Example::

            trainer.fit(module, train_loader)
            trainer.save_checkpoint("runs/mine.ckpt")
            module = Net.load_from_checkpoint("runs/mine.ckpt")
        """
        if storage_options is not None:
            raise ConfigError(
                f"storage_options must be None, got {storage_options!r}; set options of a store in the environment or "
                "in fsspec's config."
            )
        path, current = any_path("filepath", filepath).absolute(), self._runner.current
        is_file = self.saves_single_files if single_file is None else single_file
        form = SingleFile(keeps_classes=self.keeps_classes) if is_file else None
        if isinstance(current, EndedRun):
            save_ended(current, path, weights_only=bool(weights_only), single_file=form)
        else:
            save_checkpoint(self._runner.session, path, weights_only=bool(weights_only), wait=wait, single_file=form)

    def wrote_checkpoint(self, path: str | AnyPath) -> bool:
        """Return whether this run, or one that it resumes, has written the checkpoint at `path`."""
        place = as_path(path)
        try:
            return not place.is_symlink() and read_manifest(place).lineage == self._runner.session.origin.lineage
        except (CheckpointError, OSError):  # an unreadable checkpoint is not deleted
            return False

    @property
    def pending_upload(self) -> Pending | None:
        """The checkpoint that this rank is sending to a store while training goes on; None if there is none."""
        current = self._runner.current
        upload = None if current is None or isinstance(current, EndedRun) else current.writer.upload
        return None if upload is None or upload.is_over else upload

    @property
    def named_checkpoint(self) -> AnyPath | None:
        """The checkpoint that the user named to begin from, which the run must not delete; see `callbacks.run.Run`."""
        return self._runner.session.named_checkpoint

    def remove_checkpoint(self, path: str | AnyPath) -> None:
        """Delete a checkpoint of this run or of a run it resumes; leave anything else alone."""
        if self._runner.strategy.rank == 0:
            self._runner.session.writer.remove(as_path(path).absolute(), self._runner.session.origin.lineage)

    def point_to_checkpoint(self, link: str | AnyPath, path: str | AnyPath) -> None:
        """Make `link` point to the checkpoint at `path`, atomically."""
        if self._runner.strategy.rank == 0:
            self._runner.session.writer.point(as_path(link).absolute(), as_path(path).absolute())

    def roll_back(self) -> AnyPath | None:
        """Go back to this run's newest checkpoint, skip the data read since, and return its path; None without one.

        Call it only in ``on_train_step_end``. Collective: every rank calls it.
        """
        path = self._runner.session.saves.last
        if path is not None:
            roll_back(self._runner.session, path)
        return path
