"""Explanation of a difference: where it begins, in words, and what usually makes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from ...strategies.torch_internals.modules import BatchNorm
from .differences import Deviation
from .judge import First
from .report import Divergence
from .trace import BATCH, Traced, order_of

_CLOSE: Final = 1e-6
"""How close to a whole number the ratio of two gradients must be to be called a multiple."""
_CAUSE_OF_NOTHING: Final = "something that depends on the rank or on the number of ranks"


@dataclass(frozen=True)
class Scene:
    """All that is known about the step in which a layout diverges from one process."""

    module: nn.Module
    gradients: dict[str, dict[int, Deviation]]
    """Of the parameters whose gradients differ, by rank."""
    num_parameters: int
    """Of those that have a gradient."""
    sizes: tuple[tuple[int, ...], ...]
    """The samples of the micro-batches of each rank in this step."""
    reference: Traced
    """The step in one process."""
    traced: tuple[Traced, ...]
    """The same by rank; empty if it was not traced."""
    cuts_sequences: bool
    cuts_layers: bool
    tolerance: float


def explain_difference(first: First, scene: Scene) -> Divergence:
    """Return the finding for the first difference of a layout."""
    output = None if first.is_after_checkpoint else _first_output(scene)
    if output is not None:
        return _of_output(first, scene, *output)
    if first.kind in ("loss", "gradients", "gradient norm") and scene.gradients:
        return _of_gradient(first, scene)
    return _of_number(first, scene)


def first_in_backward(scene: Scene) -> str:
    """Return the parameter with a wrong gradient whose gradient is computed first: of the module called last."""
    order = order_of(scene.reference.called)
    names = [name for name, _ in scene.module.named_parameters()]

    def place(name: str) -> tuple[int, int]:
        owner = name.rpartition(".")[0]
        return order.get(owner, len(order)), names.index(name) if name in names else len(names)

    return max(scene.gradients, key=place)


def _first_output(scene: Scene) -> tuple[str, float, tuple[int, ...]] | None:
    """Return the first module in call order whose output differs, by how much, and on which ranks."""
    order = order_of(scene.reference.called)
    sizes: dict[str, dict[int, float]] = {}
    for rank, traced in enumerate(scene.traced):
        for name, one in traced.different.items():
            if one.size > scene.tolerance:
                sizes.setdefault(name, {})[rank] = one.size
    if not sizes:
        return None
    name = min(sizes, key=lambda name: order.get(name, len(order)))
    return name, max(sizes[name].values()), tuple(sizes[name])


def _of_output(first: First, scene: Scene, name: str, size: float, ranks: tuple[int, ...]) -> Divergence:
    begin = f"{_describe_first(first)} "
    if name == BATCH:
        text = f"{begin}The batch itself differs, by {size:.1g}{_on_ranks(ranks)}: the step has other samples."
        causes = (
            "a random transform outside the dataset: in collate_fn, or in a batch transfer hook",
            "a dataset whose samples depend on the order in which they are read",
        )
        return Divergence(first.step, first.kind, first.size, "", "", ranks, text, causes)
    text = (
        f"{begin}The first module in call order whose output differs is {_describe_module(scene, name)}, by {size:.1g}"
    )
    parameter = first_in_backward(scene) if scene.gradients else ""
    text += f"{_on_ranks(ranks)}." + (f" The first parameter by gradient is {parameter!r}." if parameter else "")
    return Divergence(first.step, first.kind, first.size, parameter, name, ranks, text, _causes_of_output(scene, name))


def _causes_of_output(scene: Scene, name: str) -> tuple[str, ...]:
    part = dict(scene.module.named_modules()).get(name)
    causes = []
    if scene.reference.random is not None:
        causes.append(_describe_randomness(scene))
    if isinstance(part, BatchNorm):
        causes.append(
            "batch statistics: each rank normalizes by its own part of the batch. On GPUs, sync_batchnorm=True shares "
            "them; freeze_batchnorm (--freeze-batchnorm) lets verify compare what comes after these layers"
        )
    if scene.cuts_sequences:
        causes.append(
            "positions: a rank has a part of each sequence; number its tokens by self.trainer.strategy.positions(n)"
        )
    if scene.reference.lowest is not None:
        causes.append(
            f"rounding: {scene.reference.lowest!r} computes in less than 64 bits, which rounds by about 1e-7 where the "
            "order of sums differs; give a tolerance above that, or compute in the dtype of the input"
        )
    if part is not None and (any(True for _ in part.buffers(recurse=False))):
        causes.append(
            "a buffer that is not shared: each rank updates it from its own part of the batch; average it over the "
            "ranks in the step, by self.trainer.strategy.all_reduce"
        )
    if scene.cuts_layers:
        causes.append("a fixed number of heads or features, where a rank has only a part of them (tp)")
    causes.append("a function of the whole batch, such as a mean over it: a rank has only a part")
    return tuple(causes[:3])


def _of_gradient(first: First, scene: Scene) -> Divergence:
    name = first_in_backward(scene)
    ranks, some = scene.gradients[name], len(scene.gradients)
    size, rank = max((one.size, rank) for rank, one in ranks.items())
    num_ranks = max(len(scene.sizes), 1)
    is_of_all = some == scene.num_parameters and len(ranks) == num_ranks and first.kind == "loss"
    module = "" if is_of_all else name.rpartition(".")[0]
    text = f"{_describe_first(first)} " + ("No module's output differs in the forward pass. " if scene.traced else "")
    how = "are" if some > 1 else "is"
    text += (
        f"{some} of {scene.num_parameters} gradients {how} wrong; the first parameter by gradient is {name!r} of "
        f"{_describe_module(scene, name.rpartition('.')[0])}: {_describe_ratio(ranks[rank], size)}"
        f"{_on_ranks(tuple(ranks), num_ranks)}."
    )
    if is_of_all:
        text += " All gradients are wrong, and so is the loss: look at training_step itself."
    causes = _causes_of_gradient(scene, ranks, is_of_all=some == scene.num_parameters)
    return Divergence(first.step, first.kind, first.size, name, module, tuple(ranks), text, causes)


def _causes_of_gradient(scene: Scene, ranks: dict[int, Deviation], *, is_of_all: bool) -> tuple[str, ...]:
    one = next(iter(ranks.values()))
    causes = []
    if scene.reference.random is not None:
        causes.append(_describe_randomness(scene))
    others = {round(other.ratio, 6) for other in ranks.values()}
    if len(ranks) < len(scene.sizes) or len(others) > 1:
        causes.append("ranks that disagree: this gradient is changed after the ranks have averaged it")
    if _whole_factor(one.ratio) is not None:
        causes.append("a sum counted twice: gradients or losses are summed over ranks in addition to being averaged")
    if math.isnan(one.ratio) or abs(one.ratio) < _CLOSE:
        causes.append("a parameter that is left out of the optimizer, of the graph, or of what ranks synchronize")
    if is_of_all and len({size for own in scene.sizes for size in own}) > 1:
        causes.append(
            "a loss that is a mean over unequal parts, or scaled by a number that depends on the rank: return the "
            "mean over the samples, or Loss(total, count) for a mean over another unit"
        )
    causes.append("a backward that depends on the rank: a hook on a tensor or parameter, or an autograd function")
    return tuple(causes[:3])


def _of_number(first: First, scene: Scene) -> Divergence:
    name = next(iter(first.names), "")
    ranks = tuple(first.names.get(name, {}))
    pair = f": {first.numbers[0]:.10g}, but {first.numbers[1]:.10g} on one process" if first.numbers else ""
    module = name.rpartition(".")[0] if first.kind in ("parameters", "buffers", "gradients") else None
    opening = _describe_first(first)
    causes: tuple[str, ...] = ("an update outside the optimizer, or one that depends on the rank", _CAUSE_OF_NOTHING)
    if first.kind == "metrics":
        text = f"{opening} The metric {name!r} differs{pair}."
        causes = (
            "a sum counted twice: a value that the module has reduced over ranks is reduced again by self.log",
            "a mean over unequal parts: give self.log the batch_size, or log a sum and a count",
            "a value from one rank only, or one that depends on the rank",
        )
    elif first.kind == "learning rate":
        text = f"{opening} The learning rate differs{pair}; gradients are the same."
        causes = ("a scheduler that is stepped twice, or by the module and the trainer", _CAUSE_OF_NOTHING)
    elif first.kind == "buffers":
        text = f"{opening} The buffer {name!r} of {_describe_module(scene, module or '')} differs{_on_ranks(ranks)}."
        causes = (
            "a buffer that is not shared: each rank updates it from its own part of the batch",
            "batch statistics: running averages of each rank's part",
        )
    elif first.kind == "number of steps":
        text, causes = f"{opening} A rank took a different number of steps.", (_CAUSE_OF_NOTHING,)
    else:
        names = ", ".join(repr(one) for one in list(first.names)[:3])
        text = f"{opening} {names} differ{'' if len(first.names) > 1 else 's'}{pair}{_on_ranks(ranks)}."
    if first.is_after_checkpoint:
        causes = ("state that the checkpoint does not hold: save it in state_dict or on_save_checkpoint", *causes)
    return Divergence(first.step, first.kind, first.size, name, module, ranks, text, causes)


def _describe_first(first: First) -> str:
    where = f"step {first.step}" + (", after the checkpoint," if first.is_after_checkpoint else "")
    size = f", by {first.size:.1g}" if math.isfinite(first.size) else ""
    return f"the first difference is in {where} in the {first.kind}{size}."


def _describe_randomness(scene: Scene) -> str:
    where = _describe_module(scene, scene.reference.random or "")
    return f"randomness: {where} draws random numbers, and each rank draws its own"


def _describe_module(scene: Scene, name: str) -> str:
    part = dict(scene.module.named_modules()).get(name)
    kind = type(part).__name__ if part is not None else ""
    return f"{name!r} ({kind})" if name else f"{kind}'s own step"


def _on_ranks(ranks: Sequence[int], num_ranks: int = 0) -> str:
    if not ranks or len(ranks) == num_ranks:
        return ""
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _whole_factor(ratio: float) -> int | None:
    """Return the factor by which a gradient is multiplied, or minus its divisor; None if neither is a whole number."""
    for sign, number in ((1, ratio), (-1, 1 / ratio if ratio else math.inf)):
        if math.isfinite(number) and round(number) >= 2 and abs(number - round(number)) < _CLOSE:
            return sign * round(number)
    return None


def _describe_ratio(one: Deviation, size: float) -> str:
    multiple = _whole_factor(one.ratio)
    if multiple is not None:
        return f"{multiple} times that of one process" if multiple > 0 else f"1/{-multiple} of that of one process"
    if abs(one.ratio) < _CLOSE:
        return "zero"
    return f"it differs by {size:.1g}" if math.isfinite(size) else "it is missing"
