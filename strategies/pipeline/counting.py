"""CountedOnce and Observed: of the stages that run a step one takes what it logs and updates, which is compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..distributed.nested import iterate_tensors, map_tensors, named_leaves
from ..module.traces import KeptObjects
from ..state.dtensor import gather_tensor, number_of

Tolerance = Callable[[torch.dtype], float]
"""The relative difference of values of a dtype that rounding may cause."""

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Where both runs compute the same with the same numbers."""

_METHODS: Final = ("update", "compute", "reset")
"""What makes a module a metric object, such as torchmetrics' ``Metric``, which accumulates by itself."""


class CountedOnce:
    """Lets ``self.log`` and the metric objects of a module take values only where they count.

    Args:
        module: whose step runs on several stages.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.observe: Callable[[str, object], None] | None = None
        """Called with the names and values of what counts of ``self.log``, where it is to be compared."""
        reached = KeptObjects()
        reached.keep(module)  # a metric in a plain list or dict is not a submodule
        self._metrics: list[Any] = [
            part for part in reached.modules if all(callable(getattr(type(part), name, None)) for name in _METHODS)
        ]

    @contextmanager
    def where(self, counts: Callable[[], bool]) -> Iterator[None]:
        """Let what is logged and updated inside count while `counts` says so.

        It is asked at each call: the values may come from parts that are called in between.
        """
        log = self._module.log if self.observe is None else partial(_log_and_observe, self._module.log, self.observe)
        guards = [(self._module, "log", _Guard(log, counts, _do_nothing))]
        for metric in self._metrics:
            guards.append((metric, "update", _Guard(metric.update, counts, _do_nothing)))
            guards.append((metric, "forward", _Guard(metric.forward, counts, _ForwardOfCopy(metric))))
        before = [vars(owner).get(name) for owner, name, _ in guards]
        for owner, name, guard in guards:
            vars(owner)[name] = guard
        try:
            yield
        finally:
            for (owner, name, _), method in zip(guards, before, strict=True):
                del vars(owner)[name]
                if method is not None:
                    vars(owner)[name] = method


class Observed:
    """What steps have returned and logged, to be compared."""

    def __init__(self) -> None:
        self.outputs: dict[int, object] = {}
        """By the indices of micro-batches."""
        self.logged: list[tuple[int, int, str, float]] = []
        """Micro-batch, stage, name and value of each number."""

    def keep(self, index: int, output: object) -> None:
        """Keep what a step has returned.

        Raises:
            ModuleError: for a result without values.
        """
        if any(tensor.is_meta for tensor in iterate_tensors(output)):
            raise ModuleError(
                f"The step must return values, got {type(output).__name__} on the meta device: it is computed from a "
                "parameter of another stage, which was used outside its part. Call the part, or name it for this "
                "stage, too, in configure_pipeline(num_stages)."
            )
        self.outputs[index] = map_tensors(lambda tensor: gather_tensor(tensor).detach().clone(), output)

    def note(self, index: int, stage: int, name: str, value: Any) -> None:
        """Note a number that a step logs, of this rank's part of a sequence; metric objects are not compared."""
        number = number_of(getattr(value, "of_part", value) if isinstance(value, Tensor) else value)
        if number is not None:
            self.logged.append((index, stage, str(name), number))


class _Guard:
    """A method, or what is called instead of it where its arguments do not count."""

    def __init__(
        self, method: Callable[..., object], counts: Callable[[], bool], otherwise: Callable[..., object]
    ) -> None:
        self._method, self._counts, self._otherwise = method, counts, otherwise

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._method(*args, **kwargs) if self._counts() else self._otherwise(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> _Guard:
        return self


class _ForwardOfCopy:
    """A metric's value of one batch, which leaves no trace in the metric."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric

    def __call__(self, *args: object, **kwargs: object) -> object:
        copied = copy.deepcopy(self._metric)
        for part in copied.modules():
            for name in [name for name, value in vars(part).items() if isinstance(value, _Guard)]:
                del vars(part)[name]
        return copied(*args, **kwargs)


def _log_and_observe(
    log: Callable[..., object],
    observe: Callable[[str, object], None],
    name: str,
    value: object,
    *args: object,
    **kwargs: object,
) -> None:
    observe(name, value)
    log(name, value, *args, **kwargs)


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


# --- what is compared ------------------------------------------------------------------------------------------------


def first_difference(whole: Observed, staged: Observed, index: int, tolerance: Tolerance) -> str | None:
    """Return the first value of a micro-batch that differs: of what the step returns, or logs."""
    own = dict(named_leaves(staged.outputs.get(index)))
    for name, value in named_leaves(whole.outputs.get(index)):
        other = own.get(name)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            continue
        is_exact = tolerance(torch.float32) == TOLERANCES[torch.float32]
        if not (value.is_floating_point() or is_exact):
            continue  # the index of the larger of two numbers, say
        if not _is_close(value, other, tolerance(value.dtype)):
            what = f"it returns {name}" if name and not name.endswith(("'loss']", ".total")) else "the loss is"
            return f"{what} {_format_tensor(other)}, and as a whole {_format_tensor(value)}"
    for name, values in _by_name(whole, index).items():
        others = _by_name(staged, index).get(name, [])
        if len(values) != len(others) or not all(map(_are_close(tolerance(torch.float32)), values, others)):
            return f"self.log({name!r}, ...) gets {_format_values(others)}, and as a whole {_format_values(values)}"
    return None


def _is_close(value: Tensor, other: Tensor, tolerance: float) -> bool:
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not value.numel():
        return True
    if not value.is_floating_point():
        return bool(torch.equal(value, other))
    most = value.abs().nan_to_num().max()
    return torch.allclose(other, value, rtol=0, atol=float(tolerance * most) + 1e-12, equal_nan=True)


def _are_close(tolerance: float) -> Callable[[float, float], bool]:
    def are_close(value: float, other: float) -> bool:
        return (
            value == other
            or (value != value and other != other)
            or math.isclose(value, other, rel_tol=tolerance, abs_tol=1e-12)
        )

    return are_close


def _by_name(observed: Observed, index: int) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for at, _, name, value in observed.logged:
        if at == index:
            values.setdefault(name, []).append(value)
    return values


def _format_tensor(tensor: Tensor) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"a tensor {list(tensor.shape)} of norm {float(tensor.double().norm()):.6g}"


def _format_values(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.6g}" for value in values) or "nothing"
