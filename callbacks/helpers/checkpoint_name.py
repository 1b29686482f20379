"""CheckpointName: the name of a checkpoint, from a template that names metrics."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Final

from ...common.errors import ConfigError, did_you_mean
from ...common.storage import AnyPath, as_path
from ..run import Run

_FIELD: Final = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")
EXTENSION: Final = ".ckpt"


class CheckpointName:
    """A template such as ``{epoch}-{val_loss:.2f}``: ``epoch=3-val_loss=0.25.ckpt``.

    ``epoch`` and ``step`` are integers; every other field is a metric, 0 until it is logged.

    Args:
        template: the name without ``.ckpt``; a ``/`` outside of fields creates a folder.
        insert_metric_name: write ``epoch=3`` instead of ``3``; a ``/`` in the inserted name becomes ``_``.

    Raises:
        ConfigError: for a template that is empty, or in which a brace does not begin or end a field.
    """

    def __init__(self, template: str, insert_metric_name: bool = True) -> None:
        leftover = _FIELD.sub("", template)
        if not template or "{" in leftover or "}" in leftover or any(not name for name, _ in _FIELD.findall(template)):
            raise ConfigError(
                f"filename={template!r} is not a valid template; write fields as {{name}} or {{name:.2f}}, such as "
                "'{epoch}-{val_loss:.2f}'."
            )
        self._template = template
        self._insert_metric_name = insert_metric_name
        self._has_warned = False

    @property
    def fields(self) -> list[str]:
        """The names of the fields of the template."""
        return [name for name, _ in _FIELD.findall(self._template)]

    def fill(self, metrics: Mapping[str, float]) -> str:
        """Return the name with every field replaced by its number, and ``.ckpt``.

        Raises:
            ConfigError: if a number does not fit its format, such as ``{val_loss:d}``.
        """
        return _FIELD.sub(lambda match: self._field(match, metrics), self._template) + EXTENSION

    def warn_of_unlogged(self, logged: Collection[str]) -> None:
        """Warn, once, of fields that no metric has given a number when a checkpoint is saved."""
        unlogged = [name for name in self.fields if name not in logged]
        if unlogged and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"filename={self._template!r} names {', '.join(unlogged)}, which nothing has logged by the first save: "
                f"it is written as 0.{did_you_mean(unlogged[0], logged)} Log it with self.log, or save after it is "
                "logged.",
                stacklevel=2,
            )

    def _field(self, match: re.Match[str], metrics: Mapping[str, float]) -> str:
        name, spec = match[1], (match[2] or ":")[1:]
        value = metrics.get(name, 0)
        spec = spec or ("" if isinstance(value, int) else ".6g")
        try:
            text = format(value, spec)
        except ValueError as error:
            raise ConfigError(
                f"filename={self._template!r}: {name}={value!r} cannot be written as {match[0]!r} ({error}); "
                f"give it another format, such as '{{{name}:.2f}}'."
            ) from None
        return f"{name.replace('/', '_')}={text}" if self._insert_metric_name else text


def free_name(trainer: Run, template: CheckpointName, folder: str, taken: Collection[str]) -> str:
    """Return a filled template, numbered (``-v1``) if that name is on rank 0's disk or one of the `taken` paths.

    Collective: every rank calls it.
    """
    values: dict[str, float] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if not values.keys() >= set(template.fields):
        trainer.reduce_metrics()
    metrics = trainer.callback_metrics
    values |= {name: float(metrics[name]) for name in template.fields if name in metrics and name not in values}
    if trainer.is_global_zero:
        template.warn_of_unlogged({*values, *metrics})
    name = filled = template.fill(values)
    version = 0
    base = as_path(folder)
    while str(base / name) in taken or (trainer.is_global_zero and _exists(base / name)):
        version += 1
        name = numbered(filled, version)
    free: str = trainer.strategy.ranks.all.broadcast(name)
    return free


def _exists(path: AnyPath) -> bool:
    try:
        return path.exists()
    except OSError:  # the disk cannot tell; if the save fails as well, all ranks raise
        return False


def numbered(name: str, version: int) -> str:
    """Return this name with a version, for a checkpoint whose name is taken: ``epoch=3-v1.ckpt``."""
    return f"{name.removesuffix(EXTENSION)}-v{version}{EXTENSION}"
