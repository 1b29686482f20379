"""LoggedMeans: the mean cross-entropies that evaluations log, and one warning where their targets differ."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Final

from torch import Tensor

from ...strategies.targets.noted_means import NotedMeans
from ...strategies.torch_internals.compiler import has_compiled

_MOST_BATCHES: Final = 16


class LoggedMeans:
    """The context of an evaluation batch, in which mean cross-entropies and what is logged are noted.

    An epoch's value weighs batches by their samples, which is not the mean over all targets if these differ. It looks
    at the first batches of a run but one; a step that gives ``batch_size`` has chosen its weight.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._batches_left = _MOST_BATCHES if is_shown else 0
        self._has_begun = False
        self._entered = ExitStack()
        self._mode: NotedMeans | None = None
        self._ratios: dict[str, float] = {}

    def __enter__(self) -> None:
        # torch.compile would compile once more for a context in which tensors are watched
        if not self._has_begun or has_compiled():
            self._has_begun = True
        elif self._batches_left:
            self._batches_left -= 1
            self._mode = self._entered.enter_context(NotedMeans())

    def __exit__(self, *error: object) -> None:
        self._entered.close()
        self._mode = None

    def note(self, name: str, value: Tensor, size: int) -> None:
        """Note a value that is weighted by the samples of its batch."""
        count = None if self._mode is None else self._mode.count_of(value)
        if count is None or not size:
            return
        ratio = count.item() / size
        before = self._ratios.setdefault(name, ratio)
        if abs(ratio - before) > 1e-6 * max(ratio, before):
            self._batches_left = 0
            warnings.warn(
                f"self.log({name!r}, ...) got the mean over {before:.4g} targets a sample in one batch and {ratio:.4g} "
                "in another; the epoch's value weighs batches by samples, so it is not the mean over all targets. Pass "
                "batch_size=int((labels != -100).sum()), the number of targets, to self.log.",
                stacklevel=4,
            )
