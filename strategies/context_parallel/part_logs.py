"""PartLogs: what a step on parts of sequences logs, weighted by the tokens that each part has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.abilities import widest_float
from ..targets.noted_means import NotedMeans
from ..targets.shares import TokenShare, unclear_share


class PartLogs:
    """Gives values that are logged as means their weights among the ranks that share a sequence.

    A mean cross-entropy that is logged as it is becomes that of the whole sequences, by the targets of each part; any
    other mean is weighted by the part's tokens. Sums, extremes and metric objects are left as they are.

    Args:
        merge: returns the sum of a vector over the ranks. Collective.
    """

    def __init__(self, merge: Callable[[Tensor], Tensor]) -> None:
        self._merge = merge
        self.weighted_by_tokens: set[str] = set()
        """The names whose ``batch_size`` counts tokens of a part, as the check of a first step has found."""
        self._is_alone = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the means of this part, without asking the other ranks, one of which may fail inside."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @contextmanager
    def of_part(self, module: nn.Module, share: float | None) -> Iterator[None]:
        """Weigh what a step in the block logs, which has this share of the tokens."""
        with NotedMeans() as means, _replacing_log(module, lambda plain: _Weighed(self, plain, share, means)):
            yield

    @contextmanager
    def of_whole(self, module: nn.Module, share: float) -> Iterator[None]:
        """Weigh what a step in the block logs, which one rank computes for all; the others log nothing."""
        with _replacing_log(module, lambda plain: _Weighed(self, plain, share, None) if share else _do_nothing):
            yield

    def merged(self, mean: Tensor, count: Tensor) -> Tensor:
        """Return the mean over the targets of all parts. Collective, unless this rank is `alone`."""
        if self._is_alone:
            return mean
        dtype = widest_float(mean.device)
        own, number = mean.detach().reshape(()).to(dtype), count.detach().reshape(()).to(dtype)
        total, number = self._merge(torch.stack([torch.where(number > 0, own * number, 0.0), number]))
        whole: Tensor = (total / number).to(mean.dtype)
        whole.of_part = mean.detach()  # type: ignore[attr-defined] # which a comparison of this rank alone goes by
        return whole


class _Weighed:
    """Takes the place of a module's ``log`` while a step runs."""

    def __init__(
        self, logs: PartLogs, plain: Callable[..., None], share: float | None, means: NotedMeans | None
    ) -> None:
        self._logs, self._plain, self._share, self._means = logs, plain, share, means

    def __call__(self, name: str, value: Any, *args: object, **options: Any) -> None:
        reduce_fx = options.get("reduce_fx", "mean")
        is_mean = getattr(reduce_fx, "__name__", reduce_fx) in ("mean", "avg")
        batch_size = options.get("batch_size")
        if is_mean and not (batch_size is not None and name in self._logs.weighted_by_tokens):
            is_merged = batch_size is None and options.get("sync_dist", True) and not options.get("rank_zero_only")
            count = self._means.count_of(value) if self._means and is_merged and isinstance(value, Tensor) else None
            if count is not None:
                value = self._logs.merged(value, count)
            elif self._share is None and not hasattr(value, "compute"):
                raise unclear_share(f"self.log({name!r}, ...)", "pass batch_size=, the number of tokens it is over")
            elif self._share not in (None, 1.0):
                options["batch_size"] = TokenShare(self._share, batch_size)
        self._plain(name, value, *args, **options)


def _do_nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def _replacing_log(module: nn.Module, replaced: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    own, missing = vars(module), object()
    before = own.get("log", missing)
    plain = getattr(module, "log", None)
    if plain is None:
        yield
        return
    own["log"] = replaced(plain)
    try:
        yield
    finally:
        if before is missing:
            del own["log"]
        else:
            own["log"] = before
