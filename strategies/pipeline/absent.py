"""AbsentTensor and AbsentAttributes: placeholders of values that another stage has, which say where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..distributed.nested import iterate_tensors, map_tensors
from .partition import HOOK, Partition
from .spec import Spec

_OF_FORM: Final = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda", "is_meta", "is_leaf"),
        *("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"),
        *("zero_", "fill_"),
    }
)
"""What may be asked of it: its form, not its values, which may also be set anew."""


class AbsentTensor(Tensor):
    """A tensor that parts hand to each other, and that says where it is when its values are used."""

    error: Exception
    """What is raised where it is used."""

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, error: Exception) -> Self:
        """Return one of a form, with the error of a use."""
        absent = torch.zeros(shape, dtype=dtype, device=device).as_subclass(cls)
        absent.error = error
        return absent

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Answer questions about the form, and raise the error for everything else."""
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in _OF_FORM:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise next(tensor.error for tensor in iterate_tensors((args, kwargs)) if isinstance(tensor, AbsentTensor))


def stand_in(specs: object, value: float, device: torch.device, error_of: Callable[[Spec], Exception]) -> object:
    """Return a structure of tensors that have forms and no values: filled with one number, or absent.

    Args:
        specs: the structure, with specs in place of its tensors.
        value: the number, NaN as a rule; whole numbers, of which none is NaN, become an `AbsentTensor`.
        device: where the tensors are.
        error_of: returns the error to raise where an absent one is used.
    """

    def fill(leaf: object) -> object:
        if not isinstance(leaf, Spec):
            return leaf
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return leaf.filled(value, device)
        return AbsentTensor.like(leaf.shape, leaf.dtype, device, error=error_of(leaf))

    return map_tensors(_return_unchanged, specs, fill)


def make_absent_tensors(specs: object, device: torch.device, error: Exception) -> object:
    """Return a structure of absent tensors."""

    def fill(leaf: object) -> Any:
        return AbsentTensor.like(leaf.shape, leaf.dtype, device, error=error) if isinstance(leaf, Spec) else leaf

    return map_tensors(_return_unchanged, specs, fill)


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Written(NamedTuple):
    """An attribute that a part writes when it is called."""

    part: str
    owner: str
    """The submodule that has it, by name."""
    name: str
    specs: object
    """What was written, with specs in place of its tensors."""


class _Mark(NamedTuple):
    attributes: dict[str, object]
    """Those of the submodule."""
    written: Written
    error: Exception

    def error_of(self, spec: Spec) -> Exception:
        return self.error


class AbsentAttributes:
    """Marks, while a stage runs, the attributes that parts of other stages write tensors into when they are called.

    There they would be those of an earlier step, or of another micro-batch. They are NaN until the stage receives, when
    its values do not count yet, and after that raise an error where they are used.

    Args:
        module: the module.
        partition: its stages.
        device: this rank's device.
    """

    def __init__(self, module: nn.Module, partition: Partition, device: torch.device) -> None:
        self._module, self._partition, self._device = module, partition, device
        self._written: dict[tuple[str, str], Written] = {}
        self._marks: dict[int, list[_Mark]] = {}
        self._now: list[tuple[_Mark, Any, Any]] = []
        """The marks in place, each with its value and what was there before."""

    def note(self, written: list[Written]) -> None:
        """Mark these attributes from now on."""
        self._written |= {(one.owner, one.name): one for one in written}
        self._marks.clear()

    @contextmanager
    def marked(self, stage: int) -> Iterator[None]:
        """Mark what a stage does not have, inside the block."""
        if not self._written:
            yield
            return
        if stage not in self._marks:
            self._marks[stage] = self._marks_of(stage)
        self._put(self._marks[stage], raises=stage == 0)
        try:
            yield
        finally:
            self._put([])

    def receive(self) -> None:
        """Raise an error where one of the marked attributes is used, from here on."""
        if self._now:
            self._put([mark for mark, _, _ in self._now], raises=True)

    def _put(self, marks: list[_Mark], *, raises: bool = False) -> None:
        """Put marks in the place of those that are there, which the step may have replaced meanwhile."""
        for mark, value, before in self._now:
            if mark.attributes.get(mark.written.name) is value:
                mark.attributes[mark.written.name] = before
        self._now = []
        for mark in marks:
            specs, name = mark.written.specs, mark.written.name
            if name not in mark.attributes:
                continue
            if raises:
                value = make_absent_tensors(specs, self._device, mark.error)
            else:
                value = stand_in(specs, float("nan"), self._device, mark.error_of)
            self._now.append((mark, value, mark.attributes[name]))
            mark.attributes[name] = value

    def _marks_of(self, stage: int) -> list[_Mark]:
        here = self._modules_of(stage)
        marks = []
        for one in self._written.values():
            owner = self._module.get_submodule(one.owner)
            if owner not in here:
                error = ModuleError(
                    f"{one.owner}.{one.name} is written when {one.part} is called, on stage "
                    f"{self._partition.owners(one.part)[0]}, and is used on stage {stage}, where it would be that of "
                    "an earlier micro-batch; let the blocks pass it on in their outputs, or name the part for stage "
                    f"{stage}, too, in {HOOK}(num_stages)."
                )
                marks.append(_Mark(vars(owner), one, error))
        return marks

    def _modules_of(self, stage: int) -> set[nn.Module]:
        """Return the submodules that run on a stage: all but those that only parts of other stages hold."""
        elsewhere = {
            self._module.get_submodule(name)
            for name in self._partition.parts
            if stage not in self._partition.owners(name)
        }
        here, waiting = set[nn.Module](), [self._module]
        while waiting:
            submodule = waiting.pop()
            if submodule not in here and submodule not in elsewhere:
                here.add(submodule)
                waiting.extend(submodule.children())
        return here


def attributes_of(module: nn.Module) -> Mapping[str, object]:
    """Return the attributes of a module that are its own, not torch's."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


_OF_MODULES: Final = frozenset((*vars(nn.Module()), "forward"))
