"""OptimizerProbe: small parameters on which an optimizer shows whether its parameters can be updated separately."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.nn import Parameter
from torch.optim import Optimizer

from ...common.errors import ConfigError
from ..devices.generators import fork_generators
from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors
from ..state.dtensor import is_dtensor, is_wrapper, local_shard, shard_like, with_even_shards
from ..state.optimizer_state import attributes_of, needs_closure, remake_optimizer
from ..torch_internals.compiler import is_compiler_imported
from ..torch_internals.operators import TorchDispatchMode, tree_leaves
from .shard_update import ELEMENTWISE

_MOST: Final = 8
"""The parameters that are imitated: more would show nothing new."""
_LARGEST: Final = 1 << 20
"""The most elements of one of them."""
_OF_STEPS: Final = (1.0, 0.03, 20.0)
"""The sizes of the gradients of each step: some optimizers' updates are the same for gradients all scaled alike."""
_SCALES: Final = (1.0, 1e5)
"""The sizes of gradients that are tried: many optimizers limit only those whose norm is above 1."""
_FAILURES: Final = (ArithmeticError, AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
_TOLERANCE: Final = 1e-5
"""The difference that still counts as rounding, as a fraction of the largest update."""
_EACH_ALONE: Final = frozenset(
    ("_to_copy", "alias", "copy_", "detach", "empty", "empty_like", "fill", "fill_", "full", "full_like", "lift_fresh",
     "masked_fill", "masked_fill_", "new_empty", "new_full", "new_zeros", "ones", "ones_like", "zero_", "zeros",
     "zeros_like")
)  # fmt: skip
"""Operations that compute each element from those at the same place, which torch does not mark as pointwise."""


class OptimizerProbe:
    """Steps copies of an optimizer on imitations of some of its parameters, of the same shapes and in the same groups.

    An optimizer that cannot be copied, or that fails on the imitations, shows nothing, and is not refused.

    Args:
        optimizer: the user's, which is not changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.draws = False
        """Whether a step has drawn from torch's random generator."""
        self.failure = ""
        """What the last step that failed said."""
        self._operations: _Operations | None = None
        self._has_other_state = False
        self._state: list[dict[str, Any]] = []
        self.is_quantized = type(optimizer).__module__.startswith("torchao.optim")
        """Whether the state is kept in few bits, as the class or a step has shown."""
        self._together: dict[float, list[tuple[Tensor, Tensor]] | None] = {}
        """The updates of whole parameters, by the size of the gradients: each is tried once."""

    @cached_property
    def _chosen(self) -> list[tuple[int, Any]]:
        return _choose_parameters(self.optimizer)

    def differs_if_dealt(self) -> bool:
        """Return whether a parameter is updated otherwise if the optimizer has no other one."""
        for scale in _SCALES if len(self._chosen) > 1 else ():
            together = self._updated_whole(self._chosen, scale)
            for at, chosen in enumerate(self._chosen if together is not None else ()):
                alone = self._updated([chosen], scale, _return_value)
                if together is not None and alone is not None and _updates_differ(together[at], alone[0]):
                    return True
        return False

    def differs_if_sharded(self, collectives: Collectives) -> bool:
        """Return whether a rank updates DTensors otherwise than whole parameters, or not at all. Collective.

        Even shards come first, and then uneven ones as plain tensors: an optimizer that fails on an empty shard fails
        on some ranks, while others wait for them where it communicates.
        """

        def differs(chosen: Sequence[tuple[int, object]]) -> bool:
            return bool(collectives.all_reduce(float(self._differs(shard_like, chosen)), "max"))

        self.failure = ""
        even = [(index, with_even_shards(parameter)) for index, parameter in self._chosen]
        is_uneven = any(one[1].shape != other[1].shape for one, other in zip(even, self._chosen, strict=True))
        is_uneven = bool(collectives.all_reduce(float(is_uneven), "max"))  # stages have different parameters
        if is_uneven and (differs(even) or collectives.all_reduce(float(self.fails_on_plain_shards()), "max")):
            return True
        return differs(self._chosen)

    def is_elementwise(self) -> bool:
        """Return whether each element is updated by itself, so that shards can be updated as plain tensors."""
        for scale in _SCALES:
            self._operations = operations = _Operations()
            whole = self._updated(self._chosen, scale, _return_value)
            self._operations = None
            if whole is None or not operations.are_elementwise or self.draws or self._has_other_state:
                return False
        return bool(self._chosen) and not self._differs(_plain_shard, self._chosen)

    def first_state(self) -> list[tuple[Parameter, dict[str, object]]]:
        """Return the state that some steps make for imitations of parameters, with these; empty if they fail."""
        self._updated(self._chosen, 1.0, _return_value)
        return [(parameter, state) for (_, parameter), state in zip(self._chosen, self._state, strict=False)]

    def fails_on_plain_shards(self) -> bool:
        """Return whether steps fail on this rank's shards as plain tensors, though not on whole parameters."""
        whole = self._updated_whole(self._chosen, 1.0)
        return whole is not None and self._updated(self._chosen, 1.0, _plain_shard) is None

    def _differs(self, shard: Callable[[Tensor, object], Tensor], chosen: Sequence[tuple[int, object]]) -> bool:
        differs = False
        for scale in _SCALES:  # all of them on every rank, which may see differences that others do not
            whole = self._updated_whole(chosen, scale)
            sharded = None if whole is None else self._updated(chosen, scale, shard)
            differs |= whole is not None and sharded is None
            for (_, parameter), one, other in zip(chosen, whole or (), sharded or (), strict=False):
                differs |= _updates_differ(
                    _local_shards(one, parameter), (local_shard(other[0]), local_shard(other[1]))
                )
        return differs

    def _updated_whole(self, chosen: Sequence[tuple[int, object]], scale: float) -> list[tuple[Tensor, Tensor]] | None:
        if chosen is not self._chosen:
            return self._updated(chosen, scale, _return_value)
        if scale not in self._together:
            self._together[scale] = self._updated(chosen, scale, _return_value)
        return self._together[scale]

    def _updated(
        self, chosen: Sequence[tuple[int, Any]], scale: float, shard: Callable[[Tensor, object], Tensor]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return each imitation before and after some steps; None if they failed."""
        held: dict[int, list[Parameter]] = {}
        before, stand_ins, gradients = [], [], []
        for index, parameter in chosen:
            values = _draw_numbers(parameter, seed=parameter.dim() + 7 * index)
            before.append(shard(values, parameter))
            gradients.append(
                [
                    shard(_draw_numbers(parameter, seed=100 * step + parameter.dim()) * size * scale, parameter)
                    for step, size in enumerate(_OF_STEPS, 1)
                ]
            )
            stand_ins.append(Parameter(shard(values.clone(), parameter)))
            held.setdefault(index, []).append(stand_ins[-1])
        with fork_generators(one.device for one in before):
            try:
                self._step(held, list(zip(stand_ins, gradients, strict=True)))
            except _FAILURES as error:  # of one that needs other parameters, or fails in its first step as well
                said = str(error).partition("\n")[0].partition(". ")[0]
                self.failure = f"{type(error).__name__}: {said:.150}".rstrip(": .")
                return None
        return list(zip(before, (parameter.detach() for parameter in stand_ins), strict=True))

    def _step(self, held: dict[int, list[Parameter]], pairs: Sequence[tuple[Parameter, list[Tensor]]]) -> None:
        optimizer = self.optimizer
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        groups = [copy.deepcopy(settings[index]) | {"params": parameters} for index, parameters in held.items()]
        twin = remake_optimizer(type(optimizer), copy.deepcopy(attributes_of(optimizer)), groups)
        drawn = torch.get_rng_state()
        for step in range(len(_OF_STEPS)):
            for parameter, gradients in pairs:
                parameter.grad = gradients[step].clone()
            with self._operations or nullcontext(), self._uncompiled():
                type(optimizer).step(twin)
        self.draws |= not torch.equal(drawn, torch.get_rng_state())
        states = ((value, parameter) for parameter, state in twin.state.items() for value in state.values())
        self._has_other_state |= any(_is_other(value, parameter.shape) for value, parameter in states)
        self._state = [dict(twin.state[parameter]) for parameter, _ in pairs]
        self.is_quantized |= any(is_wrapper(leaf) for leaf in iterate_tensors(self._state))

    def _uncompiled(self) -> AbstractContextManager[object]:
        """Return a context in which a step that compiles itself does not: that would take seconds for each shape."""
        # the first call imports torch._dynamo, which takes seconds itself
        compiles = is_compiler_imported() or type(self.optimizer).__module__.startswith("torchao.")
        return set_stance("force_eager") if compiles else nullcontext()


def check_can_be_dealt(probe: OptimizerProbe, strategy: str, collectives: Collectives) -> None:
    """Check that an optimizer updates each parameter by itself, as far as a few of them show that.

    Collective: every rank calls it, with all parameters or with those that are its own.

    Raises:
        ConfigError: if it does not, or if it draws random numbers.
    """
    if is_known_optimizer(probe.optimizer) or collectives.is_fake:
        return
    kind = type(probe.optimizer).__name__
    differs = probe.differs_if_dealt()
    draws, differs = (any(seen) for seen in zip(*collectives.all_gather_object((probe.draws, differs)), strict=True))
    if draws:
        raise ConfigError(
            f"strategy={strategy!r} deals parameters out to ranks, but {kind} draws random numbers when it updates "
            "them, which would be others on each rank; use strategy='ddp', or an optimizer without random numbers."
        )
    if differs:
        raise ConfigError(
            f"strategy={strategy!r} deals parameters out to ranks, but {kind} updates a parameter otherwise if it has "
            "no others, as with a norm over all gradients; use strategy='ddp', or an optimizer that updates each "
            "parameter by itself."
        )


def check_can_be_sharded(probe: OptimizerProbe, strategy: str, collectives: Collectives) -> bool:
    """Check that an optimizer updates shards as it updates whole parameters. Collective: every rank calls it.

    Returns:
        whether it has to step on plain tensors, as its operations fail on DTensors.

    Raises:
        ConfigError: if it updates shards otherwise.
    """
    optimizer, kind = probe.optimizer, type(probe.optimizer).__name__
    if type(optimizer) in ELEMENTWISE or needs_closure(optimizer) or collectives.is_fake:
        return False
    differs = not probe.is_quantized and probe.differs_if_sharded(collectives)
    if collectives.all_reduce(float(probe.is_quantized), "max"):
        return _check_quantized(probe, strategy, collectives)
    if not differs:
        return False
    failure = next(filter(None, collectives.all_gather_object(probe.failure)), "")
    if not collectives.all_reduce(float(not probe.is_elementwise()), "max"):
        return True
    raise ConfigError(
        f"strategy={strategy!r} shards parameters, but {kind} "
        + (f"fails on shards ({failure})" if failure else "updates shards otherwise than whole parameters")
        + "; use strategy='zero' or 'ddp', or an optimizer whose operations know DTensors."
    )


def _check_quantized(probe: OptimizerProbe, strategy: str, collectives: Collectives) -> bool:
    """Check that an optimizer whose state has few bits updates the shards of this rank as plain tensors. Collective.

    It quantizes each shard in blocks of its own, so that the updates differ from those of whole parameters by the
    rounding of its bits where a shard ends inside a block, or is too small to be quantized.

    Raises:
        ConfigError: if it fails on them.
    """
    fails = probe.fails_on_plain_shards()
    failure = next(filter(None, collectives.all_gather_object(probe.failure if fails else "")), "")
    if failure:
        raise ConfigError(
            f"strategy={strategy!r} shards parameters, but {type(probe.optimizer).__name__} fails on shards "
            f"({failure}); use strategy='zero' or 'ddp', or another optimizer."
        )
    return True


def attribute_with_parameters(optimizer: Optimizer) -> str | None:
    """Return the first attribute that holds parameters or another optimizer, besides the groups; None without one."""
    return next((name for name, value in attributes_of(optimizer).items() if _has_parameters(value)), None)


def is_known_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's, which draws no random numbers and updates each parameter by itself."""
    return type(optimizer).__module__.startswith("torch.optim.") or needs_closure(optimizer)


def _choose_parameters(optimizer: Optimizer) -> list[tuple[int, object]]:
    """Return parameters, each with its group: the smallest and the largest of each kind, then others.

    Some optimizers treat matrices from a certain size on in another way.
    """
    if attribute_with_parameters(optimizer) is not None:
        return []  # a copy could change them
    held = [
        (index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad and not parameter.is_meta and 0 < parameter.numel() <= _LARGEST
    ]
    held.sort(key=lambda each: each[1].numel())
    smallest = {(index, _kind_of_parameter(parameter)): (index, parameter) for index, parameter in reversed(held)}
    largest = {(index, _kind_of_parameter(parameter)): (index, parameter) for index, parameter in held}
    chosen = {id(each[1]): each for each in (*smallest.values(), *largest.values(), *held)}
    return list(chosen.values())[:_MOST]


def _kind_of_parameter(parameter: Any) -> tuple[object, ...]:
    """Return what optimizers tell parameters apart by: the dimensions, those above 1, and how it is sharded."""
    layout = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else ()
    return parameter.dim(), sum(size > 1 for size in parameter.shape), layout


def _has_parameters(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
    return any(isinstance(each, Parameter | Optimizer) for each in values)


def _draw_numbers(parameter: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)


def _return_value(value: Tensor, like: object) -> Tensor:
    return value


def _plain_shard(value: Tensor, like: object) -> Tensor:
    return local_shard(shard_like(value, like)).clone()


def _is_other(value: object, shape: torch.Size) -> bool:
    """Return whether a value of an optimizer's state is more than a number, and no tensor of its parameter's shape."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape != shape
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


class _Operations(TorchDispatchMode):
    """Sees whether operations compute each element of tensors from those at the same place alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_elementwise = True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        is_alone = torch.Tag.pointwise in func.tags or name in _EACH_ALONE
        is_alone |= name.startswith(("_foreach_", "_fused_")) and "norm" not in name and "max" not in name
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if not is_alone and any(tensor.dim() for tensor in tensors):
            self.are_elementwise = False
        return result


def _local_shards(pair: tuple[Tensor, Tensor], parameter: object) -> tuple[Tensor, Tensor]:
    return local_shard(shard_like(pair[0], parameter)), local_shard(shard_like(pair[1], parameter))


def _updates_differ(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Return whether two updates of the same parameter differ."""
    if not one[0].numel():
        return False
    updates = one[1] - one[0], other[1] - other[0]
    largest = max(float(update.abs().max()) for update in updates)
    return float((updates[0] - updates[1]).abs().max()) > _TOLERANCE * largest
