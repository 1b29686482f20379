"""CheckpointName: how a checkpoint is called, from a template that names metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ...strategies.errors import ConfigError

_FIELD: Final = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")
_SUFFIX: Final = ".ckpt"


class CheckpointName:
    """A template such as ``{epoch}-{val_loss:.2f}``: ``epoch=3-val_loss=0.25.ckpt``.

    ``epoch`` and ``step`` are whole numbers, every other field is a metric. A metric that has not been logged yet reads
    ``nan`` (Lightning: 0, which looks like a value).

    Args:
        template: the name without ``.ckpt``; a ``/`` outside of fields makes a folder.
        insert_metric_name: write ``epoch=3`` instead of ``3``; a ``/`` in the inserted name becomes ``_``.

    Raises:
        ConfigError: for a template that is empty, or in which a brace does not begin or end a field.
    """

    def __init__(self, template: str, insert_metric_name: bool = True) -> None:
        leftover = _FIELD.sub("", template)
        if not template or "{" in leftover or "}" in leftover or any(not name for name, _ in _FIELD.findall(template)):
            raise ConfigError(
                f"filename={template!r} is not a template for names; write fields as {{name}} or {{name:.2f}}, "
                "such as '{epoch}-{val_loss:.2f}'."
            )
        self._template = template
        self._insert_metric_name = insert_metric_name

    @property
    def fields(self) -> list[str]:
        """What the template names."""
        return [name for name, _ in _FIELD.findall(self._template)]

    def fill(self, metrics: Mapping[str, float]) -> str:
        """Return the name with every field replaced by its number, and ``.ckpt``.

        Raises:
            ConfigError: when a number does not take its format, such as ``{val_loss:d}``.
        """
        return _FIELD.sub(lambda match: self._field(match, metrics), self._template) + _SUFFIX

    def _field(self, match: re.Match[str], metrics: Mapping[str, float]) -> str:
        name, spec = match[1], (match[2] or ":")[1:]
        value = metrics.get(name, float("nan"))
        spec = spec or ("" if isinstance(value, int) else ".6g")
        try:
            text = format(value, spec)
        except ValueError as error:
            raise ConfigError(
                f"filename={self._template!r}: {name}={value!r} cannot be written as {match[0]!r} ({error}); "
                f"give it another format, such as '{{{name}:.2f}}'."
            ) from None
        return f"{name.replace('/', '_')}={text}" if self._insert_metric_name else text


def numbered(name: str, version: int) -> str:
    """Return the name for the `version`-th checkpoint that would have the same: ``epoch=3-v1.ckpt``."""
    return f"{name.removesuffix(_SUFFIX)}-v{version}{_SUFFIX}"
