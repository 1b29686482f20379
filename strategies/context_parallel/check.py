"""Check of a module's first steps under context parallelism: parts of sequences against whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import EchelonError, ModuleError
from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors
from ..module.untouched import trying_steps
from ..targets.noted_means import NotedMeans
from ..targets.shares import unclear_share
from ..torch_internals.autograd import is_wrapped
from .context import ContextParallel
from .counted import Counted, log_difference, metric_difference, names_by_tokens
from .sequence import SequenceLayout

# relative to the compared values: rounding stays far below them, and a wrong position goes far above
_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE: Final = 5e-2


@dataclass(frozen=True)
class _Output:
    """A submodule's output, as its shapes and two numbers for each tensor."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    digests: Tensor
    """Has the shape (tensors, 2): the norm, and a sum in which each element has its own weight."""
    tolerance: float


def check_step(
    context: ContextParallel,
    module: nn.Module,
    args: Sequence[object],
    run: Callable[..., object],
    collectives: Collectives,
    weighted_by_tokens: set[str],
) -> None:
    """Run a step on whole sequences and on their parts, and compare each submodule's output. Collective.

    Args:
        context: cuts the batch.
        module: the user's module, which the steps leave unchanged.
        args: the arguments of the step; the first is the whole batch, as the loader returned it.
        run: calls the step; returns None if the step, and so the loss, ends on another rank.
        collectives: over the ranks that share the sequences, and those of the module's pipeline stages.
        weighted_by_tokens: gets the names that are logged with a ``batch_size`` which counts tokens of a part.

    Raises:
        ModuleError: on all ranks, naming the first submodule whose output differs, or the loss.
    """
    batch, *rest = args
    lengths = context.lengths(batch, module)
    if context.is_short(lengths):  # each rank computes the whole; but others may compare at the same time
        for _ in range(2):
            with trying_steps(module, args):
                run(*args)
        return
    length, share = max(lengths), context.share(lengths)
    windows = _windows_of(module, length)
    with trying_steps(module, args):
        counted, part_of_batch = Counted(module, share), context.cut(batch, module)
        undifferentiated = _without_derivatives(module, context.size)
        with _said_of_parts(context.size), context.attention(), _naming_windows(windows), undifferentiated:
            parts, loss_of_part = _observe_step(module, lambda: run(part_of_batch, *rest), counted.means, share)
        of_parts = counted.record()
    with trying_steps(module, args):  # from the same state and random numbers
        counted, cut = Counted(module), (context.sequence_cut, length)
        whole, loss = _observe_step(module, lambda: run(batch, *rest), counted.means, 1.0, cut, parts)
        of_whole = counted.record()
    loss_of_parts = collectives.all_reduce(loss_of_part)  # 0 on ranks of other stages
    found = _first_difference(whole, parts), _loss_difference(loss, loss_of_parts, context.size)
    # from all ranks, since positions may be right in the first part of a sequence
    all_found, all_parts, all_whole = zip(*collectives.all_gather_object((found, of_parts, of_whole)), strict=True)
    of_outputs, of_losses = zip(*all_found, strict=True)
    first = next((difference for difference in (*of_outputs, *of_losses) if difference), None)
    if first is not None:
        raise ModuleError(
            f"{type(module).__name__} computes different results from parts of a sequence (cp={context.size}) than "
            f"from the whole: {first}. {windows}Take positions from self.trainer.strategy.positions(length), shift "
            "targets in the dataset, do not pool over the sequence, and return Loss(total, count) if parts have "
            "different numbers of tokens in the loss; or use cp=1."
        )
    all_whole = all_whole[:: context.size]
    weighted_by_tokens |= names_by_tokens(all_whole, all_parts)
    first = log_difference(counted, all_whole, all_parts, context.size) or metric_difference(
        counted, all_whole, all_parts, context.size
    )
    if first is not None:
        raise ModuleError(
            f"{type(module).__name__} counts something else in parts of a sequence (cp={context.size}) than in the "
            f"whole: {first}. Log means and sums over the part's tokens; compute other values (a perplexity, an F "
            "score) in metric objects that add up over tokens, count samples in one of them, or use cp=1."
        )


@contextmanager
def _said_of_parts(cp: int) -> Iterator[None]:
    """Add a note to an error of the user's code that a step on a part of the batch raises."""
    try:
        yield
    except EchelonError:
        raise
    except Exception as error:
        error.add_note(
            f"This step ran on a part of the batch: cp={cp} cuts its tensors along their sequences. Override "
            "sequence_dims if some have none; a module that needs whole inputs cannot be cut: use strategy='fsdp'."
        )
        raise


def _windows_of(module: nn.Module, length: int) -> str:
    """Return a sentence on the attention windows that are shorter than a sequence; empty if there are none."""
    found = {
        f"{prefix}.{attribute}".lstrip("."): value
        for name, submodule in module.named_modules()
        for prefix, owner in ((name, submodule), (f"{name}.config", getattr(submodule, "config", None)))
        for attribute, value in getattr(owner, "__dict__", {}).items()
        if "window" in attribute and type(value) is int and 0 < value < length
    }
    if not found:
        return ""
    listed = ", ".join(f"{name}={value}" for name, value in list(found.items())[:3])
    return (
        f"It has attention windows that are shorter than the sequences of {length} tokens ({listed}); cp attends to "
        "whole sequences, or to what a mask allows: pass echelon.document_mask(ids, window=...), or use cp=1. "
    )


@contextmanager
def _naming_windows(windows: str) -> Iterator[None]:
    """Add the windows to an error of attention."""
    try:
        yield
    except ModuleError as error:
        raise (ModuleError(f"{error} {windows}".strip()) if windows else error) from error


@contextmanager
def _without_derivatives(module: nn.Module, size: int) -> Iterator[None]:
    """Say what a step that computes derivatives cannot do, in place of torch's error about gradients that are off."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ModuleError(
            f"{type(module).__name__} computes derivatives inside of its step (torch.autograd.grad), which are not "
            f"those of the whole sequence in a part of it (cp={size}); use dp_shard and tp instead of cp."
        ) from error


@contextmanager
def _observing_submodules(module: nn.Module, observe: Callable[[str, object], None]) -> Iterator[None]:
    handles = [
        submodule.register_forward_hook(lambda _, __, output, name=name: observe(name, output))
        for name, submodule in module.named_modules()
        if submodule is not module
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe_step(
    module: nn.Module,
    step: Callable[[], object],
    means: NotedMeans,
    share: float | None,
    cut: tuple[SequenceLayout, int] | None = None,
    parts: Sequence[_Output] = (),
) -> tuple[list[_Output], Tensor]:
    """Return the outputs of the submodules in a step, and the loss as a total and a count.

    With `cut`, for sequences of a length, each output is cut to the shape of that in `parts` with the same index.
    """
    outputs: list[_Output] = []

    def observe(name: str, output: object) -> None:
        # a number over all tokens, such as a model's own loss, is that of the part; what is made of it is compared.
        # Inside of a transformation of torch.func, values are not known
        own = (tensor for tensor in iterate_tensors(output) if not is_wrapped(tensor))
        tensors = [x.detach() for x in own if x.is_floating_point() and x.ndim]
        if tensors and cut is not None:
            shapes = parts[len(outputs)].shapes if len(outputs) < len(parts) else ()
            tensors = [_cut_like(t, s, *cut) for t, s in zip(tensors, shapes, strict=False)]
        if tensors:
            digests = torch.stack([_digest_tensor(tensor) for tensor in tensors])
            tolerance = max(_TOLERANCES.get(tensor.dtype, _LOW_PRECISION_TOLERANCE) for tensor in tensors)
            outputs.append(_Output(name, tuple(tuple(t.shape) for t in tensors), digests, tolerance))

    with _observing_submodules(module, observe), means:
        returned = step()
    is_weighted = getattr(module, "automatic_optimization", True)  # by its targets
    return outputs, _total_and_count(returned, means if is_weighted else NotedMeans(), share)


def _cut_like(whole: Tensor, shape: tuple[int, ...], cut: SequenceLayout, length: int) -> Tensor:
    """Return this rank's part of an output, along the only dimension in which the shapes differ.

    It may have the tokens of all sequences, one sequence after the other, as layers of experts do.
    """
    differing = [dim for dim, (size, own) in enumerate(zip(whole.shape, shape, strict=False)) if size != own]
    if len(shape) != whole.ndim or len(differing) != 1:
        return whole
    dim = differing[0]
    number, own = whole.shape[dim], shape[dim]
    if number > length and number % length == 0 and own * length == number * cut.part_length(length):
        return cut.take(whole.unflatten(dim, (-1, length)), dim + 1).flatten(dim, dim + 1)
    return cut.take(whole, dim) if own == cut.part_length(number) else whole


def _digest_tensor(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).double()
    weights = torch.arange(len(flat), device=flat.device, dtype=torch.double).mul_(0.7).cos_()
    return torch.stack([flat.norm(), flat @ weights]).cpu()


def loss_in(returned: Any) -> Tensor | None:
    """Return the tensor of the loss, or of its total, in what a step has returned."""
    returned = returned.get("loss") if isinstance(returned, Mapping) else returned
    total = getattr(returned, "total", returned)
    return total if isinstance(total, Tensor) else None


def _total_and_count(returned: object, means: NotedMeans, share: float | None) -> Tensor:
    """Return the loss of a step as a total and a count; a mean of anything but targets counts by its share."""
    total = loss_in(returned)
    if total is None:
        return torch.zeros(2, dtype=torch.double)
    count = getattr(returned.get("loss") if isinstance(returned, Mapping) else returned, "count", None)
    if count is None or callable(count):
        of_targets = means.count_of(total)
        if of_targets is None and share is None:
            raise unclear_share("The loss", "return Loss(total, count)")
        count = share if of_targets is None else of_targets
        total = total * count if count else torch.zeros_like(total)  # the mean over nothing is not a number
    return torch.stack([total.detach().double().cpu(), torch.as_tensor(count, dtype=torch.double).cpu()])


def _first_difference(whole: Sequence[_Output], parts: Sequence[_Output]) -> str | None:
    for expected, own in zip(whole, parts, strict=False):
        if expected.name != own.name or expected.shapes != own.shapes:
            return (
                f"the output of {own.name} has shapes {own.shapes}, but that of {expected.name} from whole sequences "
                f"has {expected.shapes}"
            )
        if _digests_differ(expected.digests, own.digests, expected.tolerance):
            return f"the first output that differs is that of {own.name}"
    return None


def _digests_differ(expected: Tensor, own: Tensor, tolerance: float) -> bool:
    # the sum may be near zero by chance, so both are compared relative to the norm
    return bool(((expected - own).abs() > tolerance * expected[..., :1].abs() + 1e-12).any())


def _loss_difference(whole: Tensor, parts: Tensor, num_parts: int) -> str | None:
    expected, own = (values[0] / values[1].clamp(min=1e-300) for values in (whole, parts))
    ratio = float(parts[1] / whole[1]) if whole[1] else 1.0
    if min(abs(ratio - 1), abs(ratio - num_parts)) > 1e-9:  # such as labels that are shifted in each part
        return f"the loss counts {parts[1]:g} from the parts, but {whole[1]:g} from the whole sequences"
    if not whole[1] or not torch.isfinite(expected) or abs(expected - own) <= 1e-4 * abs(expected) + 1e-12:
        return None
    return f"the loss is {own:.6g} from the parts, but {expected:.6g} from the whole sequences"
