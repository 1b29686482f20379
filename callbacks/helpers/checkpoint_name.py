"""CheckpointName: the name of a checkpoint, from a template that names metrics."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ...common.errors import ConfigError, did_you_mean
from ...common.storage import AnyPath, as_path
from ..run import Run

_FIELD: Final = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")
EXTENSION: Final = ".ckpt"


@dataclass(frozen=True)
class NameStyle:
    """How the names of a callback's checkpoints are written."""

    extension: str = EXTENSION
    equals: str = "="
    """What stands between the name of a metric and its number."""
    first_version: int | None = 1
    """The number that a name gets if it is taken; None: what has the name is replaced."""
    last: str = "last"
    """The name of the link to the newest checkpoint, without the extension."""

    def __post_init__(self) -> None:
        if "{" in self.last:
            raise ConfigError(
                f"CHECKPOINT_NAME_LAST={self.last!r} must have no fields: the link to the newest checkpoint keeps its "
                "name; write them into filename, which the checkpoint itself has."
            )

    @property
    def link(self) -> str:
        """The name of the link to the newest checkpoint."""
        return self.last + self.extension


class CheckpointName:
    """A template such as ``{epoch}-{val_loss:.2f}``: ``epoch=3-val_loss=0.25.ckpt``.

    ``epoch`` and ``step`` are integers; every other field is a metric, 0 until it is logged.

    Args:
        template: the name without ``.ckpt``; a ``/`` outside of fields creates a folder.
        insert_metric_name: write ``epoch=3`` instead of ``3``; a ``/`` in the inserted name becomes ``_``.
        style: the extension, and what else may differ.

    Raises:
        ConfigError: for a template that is empty, or in which a brace does not begin or end a field.
    """

    def __init__(self, template: str, insert_metric_name: bool = True, style: NameStyle | None = None) -> None:
        leftover = _FIELD.sub("", template)
        if not template or "{" in leftover or "}" in leftover or any(not name for name, _ in _FIELD.findall(template)):
            raise ConfigError(
                f"filename={template!r} is not a valid template; write fields as {{name}} or {{name:.2f}}, such as "
                "'{epoch}-{val_loss:.2f}'."
            )
        self.style = style or NameStyle()
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
        return _FIELD.sub(lambda match: self._field(match, metrics), self._template) + self.style.extension

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
        return f"{name.replace('/', '_')}{self.style.equals}{text}" if self._insert_metric_name else text


def free_name(trainer: Run, template: CheckpointName, folder: str, taken: Collection[str]) -> str:
    """Return a filled template, numbered (``-v1``) if that name is on rank 0's disk or one of the `taken` paths.

    If its style says that such a checkpoint is replaced, it gets no number. Collective: every rank calls it.
    """
    values: dict[str, float] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if not values.keys() >= set(template.fields):
        trainer.reduce_metrics()
    metrics = trainer.callback_metrics
    values |= {name: float(metrics[name]) for name in template.fields if name in metrics and name not in values}
    if trainer.is_global_zero:
        template.warn_of_unlogged({*values, *metrics})
    name = filled = template.fill(values)
    version, base = template.style.first_version, as_path(folder)
    while version is not None and (
        str(base / name) in taken or (trainer.is_global_zero and _can_see_path(base / name))
    ):
        name = name_with_version(filled, version, template.style.extension)
        version += 1
    free: str = trainer.strategy.ranks.all.broadcast(name)
    return free


def _can_see_path(path: AnyPath) -> bool:
    try:
        return path.exists()
    except OSError:  # the disk cannot tell; if the save fails as well, all ranks raise
        return False


def name_with_version(name: str, version: int, extension: str = EXTENSION) -> str:
    """Return this name with a version, for a checkpoint whose name is taken: ``epoch=3-v1.ckpt``."""
    return f"{name.removesuffix(extension)}-v{version}{extension}"
