"""Deferred initialization: a module is built without allocating memory, and initialized later, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...common.errors import ModuleError
from ..state.sources import TensorSource, copy_whole, fill_from
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.modules import find_trunc_normal, set_trunc_normal
from ..torch_internals.operators import (
    OpOverload,
    TorchDispatchMode,
    list_arguments,
    read_schema_name,
    tree_leaves,
    tree_map,
)
from ..torch_internals.tensors import DisableTorchFunction, read_memory_id

_IS_META: Final = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE: Final = Tensor.device.__get__
_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_DEFERRED: Final = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm)
)
"""Functions whose tensors are on the meta device even if the CPU is requested: it may be a parameter's ``device``."""
_FROM_DATA: Final = (torch.tensor, torch.as_tensor)
_INDEXING: Final = (Tensor.__getitem__, Tensor.__setitem__)
_OVERWRITING: Final = {
    f"aten::{name}"
    for name in ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_")
}

Places = Mapping[int, Sequence[str]]
"""The names of tensors, by the identity of their storage."""


class DeferredInit:
    """A record of how a module's tensors are initialized, to be replayed once the module is sharded.

    Inside `recording`, new tensors are on the meta device, and the operations on them are recorded. `replay` performs
    the operations, with the random numbers that would have been drawn; a whole tensor exists only until the last
    operation on it. A module can thus be larger than memory, as long as each tensor fits. The idea is torchdistx's.
    """

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._outlines: dict[str, _Outline] = {}
        self.generator = torch.get_rng_state()
        """The state of the random generator when recording began; all ranks replay with the same one."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Build modules inside the block without allocating memory, and record the operations.

        Raises:
            ModuleError: for operations that cannot be replayed, such as reading values.
        """
        self.generator = torch.get_rng_state()
        try:
            operations = self._operations
            with torch.device("meta"), _AsIfReal(operations), _Recorder(operations), _trunc_normal_as_one(operations):
                yield
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if isinstance(error, ModuleError) or "meta" not in str(error).lower():
                raise
            raise ModuleError(
                f"configure_model reads values that do not exist yet ({str(error)[:160]}), which deferred_init=True "
                "cannot replay; build that layer in __init__, or leave deferred_init out."
            ) from error
        if not torch.equal(self.generator, torch.get_rng_state()):
            raise ModuleError(
                "configure_model changed the state of the random generator, by torch.manual_seed or by drawing into a "
                "tensor that is not deferred (torch.Tensor(...), torch.tensor(data, device=...)), which "
                "deferred_init=True cannot replay; seed before fit (seed_everything), or leave deferred_init out."
            )

    def places(self, module: nn.Module) -> Places:
        """Return the tensors of a module that `replay` can initialize; call it before the module is converted."""
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._outlines = {name: _Outline.of(tensor) for name, tensor in named if tensor.device.type == "meta"}
        recorded = {memory for operation in self._operations for memory in operation.touched()}
        names: dict[int, list[str]] = {}
        for name, outline in self._outlines.items():
            if outline.memory in recorded:
                names.setdefault(outline.memory, []).append(name)
        return names

    def replay(self, places: Places, take: Callable[[str, Tensor | TensorSource], None]) -> None:
        """Compute the tensors on the CPU, and call `take` with each name of a tensor as soon as it is complete.

        The random generator ends in the state in which building the module in one process would leave it, unless it has
        been used since recording. A tensor that was filled from a source, and not changed or read since, is taken as
        the source, of which nothing has been read; then no numbers are drawn but those that other tensors keep.
        """
        needed = _needed_operations(self._operations, set(places))
        draws_all = not any(self._operations[at].fills_all for at in needed)
        last = {memory: at for at in sorted(needed) for memory in self._operations[at].touched()}
        now = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        real: dict[int, torch.UntypedStorage] = {}
        given: dict[int, _Operation] = {}
        for at, operation in enumerate(self._operations):
            if at not in needed:
                if operation.is_random and draws_all:
                    operation.perform({})  # to advance the random generator
                continue
            if operation.fills_all:
                memory = operation.output.memory
                if last[memory] > at:
                    given[memory] = operation  # filled when the next operation needs it: all at once might not fit
                    continue
                if self._take_given(places.get(memory, ()), operation, take):
                    continue
            for memory in operation.touched() & given.keys():
                given.pop(memory).perform(real)
            operation.perform(real)
            complete = {memory: real.pop(memory) for memory in operation.touched() if last[memory] == at}
            for name in (name for memory in complete for name in places.get(memory, ())):
                take(name, self._outlines[name].real(complete))
        if not torch.equal(now, self.generator):
            torch.set_rng_state(now)

    def _take_given(
        self, names: Sequence[str], operation: _Operation, take: Callable[[str, Tensor | TensorSource], None]
    ) -> bool:
        """Call `take` with a source for each name of the tensor that it fills; return whether it fills all of them."""
        fits = all(self._outlines[name].is_like(operation.output) for name in names)
        for name in names if fits else ():
            take(name, operation.function.source)
        return fits


class _AsIfReal(TorchFunctionMode):
    """Hides the meta device, and makes tensors from data on the CPU first, since the meta device would drop the data.

    Functions of torch.nn.init do nothing if ``tensor.is_meta`` (torch 2.14), and models of transformers are not
    initialized if a new tensor is on the meta device (transformers 5).
    """

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is fill_from and _is_meta(args[0]):
            outline = _Outline.of(args[0])
            self._operations.append(_Operation(_Fill(args[1]), (outline,), {}, outline))
            return None
        if func == _IS_META:
            return False
        if func == _DEVICE:
            return _CPU
        if kwargs.get("device") in (_META, "meta"):
            raise ModuleError(
                "configure_model makes a tensor with device='meta', as from_pretrained does if configure_model is the "
                "first to import transformers, which deferred_init=True cannot replay; build from a config and load "
                "the weights with echelon.load_pretrained, or import transformers before fit."
            )
        if func in _INDEXING and isinstance(args[1], list):
            # torch would make a tensor of it on the meta device
            args = (args[0], torch.tensor(args[1], device="cpu"), *args[2:])
        if func in _DEFERRED or (func is Tensor.to and _is_meta(args[0])):
            args, kwargs = tree_map(_deferred_device, (args, kwargs))
        if func not in _FROM_DATA or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to("meta")


class _Recorder(TorchDispatchMode):
    """Records every operation on meta tensors."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        before = _outline_tensors((args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        operation = _Operation(func, before[0], before[1], _outline_tensors(output))
        if operation.touched():
            self._operations.append(operation)
        return output


@contextmanager
def _trunc_normal_as_one(operations: list[_Operation]) -> Iterator[None]:
    """Record a call of ``nn.init.trunc_normal_`` as one operation."""
    original = find_trunc_normal()

    def record(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        outline = _Outline.of(tensor)
        operations.append(_Operation(original, (outline, *args), kwargs, outline))
        return tensor

    with _trunc_normal_replaced(_is_meta, record):
        yield


@contextmanager
def without_trunc_normal() -> Iterator[None]:
    """Have ``nn.init.trunc_normal_`` leave tensors alone that have no memory, and so no values to draw again."""
    with _trunc_normal_replaced(is_without_memory, lambda tensor, *_, **__: tensor):
        yield


@contextmanager
def _trunc_normal_replaced(applies: Callable[[Tensor], bool], other: Callable[..., Tensor]) -> Iterator[None]:
    """Call another function instead of ``nn.init.trunc_normal_``, for the tensors to which that applies.

    It redraws numbers outside the bounds (torch 2.14), for which it reads values.
    """
    original = find_trunc_normal()

    def trunc_normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (other if applies(tensor) else original)(tensor, *args, **kwargs)

    set_trunc_normal(trunc_normal_)
    try:
        yield
    finally:
        set_trunc_normal(original)


@dataclass(frozen=True)
class _Outline:
    """The layout of a meta tensor at one moment, since operations such as ``t_`` change it in place."""

    storage: torch.UntypedStorage
    """A storage without memory; tensors that would share memory share it."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Outline:
        """Return the outline of a meta tensor."""
        offset = int(tensor.storage_offset())
        return cls(tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(), offset)

    @property
    def memory(self) -> int:
        """The identity of the storage."""
        return read_memory_id(self.storage)

    @property
    def is_all(self) -> bool:
        """Whether the tensor fills its storage."""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def is_like(self, other: _Outline) -> bool:
        """Return whether another outline is of the same elements in the same layout."""
        return (self.memory, self.dtype, self.shape, self.stride, self.offset) == (
            other.memory, other.dtype, other.shape, other.stride, other.offset,
        )  # fmt: skip

    def real(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Return the tensor on the CPU, in the storage that replaces its own, which is allocated if missing."""
        if self.memory not in storages:
            storages[self.memory] = torch.UntypedStorage(self.storage.nbytes())
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storages[self.memory], self.offset, self.shape, self.stride)


class _Fill(NamedTuple):
    """A function that fills a tensor from a source."""

    source: TensorSource

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill the tensor, and return it."""
        copy_whole(self.source, tensor)
        return tensor


class _Operation(NamedTuple):
    """A call of a torch function, with outlines in place of tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, object]
    output: Any

    @property
    def is_random(self) -> bool:
        """Whether the call draws random numbers."""
        if isinstance(self.function, _Fill):
            return False
        return not self._is_operator or torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def fills_all(self) -> bool:
        """Whether it fills a whole tensor from a source."""
        return isinstance(self.function, _Fill) and bool(self.output.is_all)

    @property
    def _is_operator(self) -> bool:
        """Whether it is a single torch operator; otherwise it is a function that initializes its first argument."""
        return isinstance(self.function, OpOverload)

    def touched(self) -> set[int]:
        """Return the storages of its arguments and results."""
        return _collect_memories((self.args, self.kwargs, self.output))

    def changed(self) -> set[int]:
        """Return the storages whose values it changes."""
        if not self._is_operator:
            return _collect_memories(self.output)
        arguments = list_arguments(self.function)
        positional = zip(arguments, self.args, strict=False)
        named = ((argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs)
        written = [value for argument, value in chain(positional, named) if argument.is_write]
        return _collect_memories(written) | (
            _collect_memories(self.output) - _collect_memories((self.args, self.kwargs))
        )

    def read(self) -> set[int]:
        """Return the storages whose values it reads."""
        first = self.args[0] if self.args else None
        others = _collect_memories((self.args[1:], self.kwargs))
        overwrites = not self._is_operator or read_schema_name(self.function) in _OVERWRITING
        if overwrites and isinstance(first, _Outline):
            return others if first.is_all else others | {first.memory}
        return _collect_memories((self.args, self.kwargs))

    def perform(self, real: dict[int, torch.UntypedStorage]) -> None:
        """Call the function on the CPU, on the storages that replace the recorded ones; missing ones are allocated."""

        def replace(value: object) -> Any:
            if isinstance(value, _Outline):
                return value.real(real)
            return torch.device("cpu") if value == _META else value

        with torch.no_grad():
            output = self.function(*tree_map(replace, self.args), **tree_map(replace, self.kwargs))
        for outline, made in zip(tree_leaves(self.output), tree_leaves(output), strict=True):
            if isinstance(outline, _Outline) and outline.memory not in real:
                outline.real(real).copy_(made)


def _needed_operations(operations: Sequence[_Operation], wanted: set[int]) -> set[int]:
    """Return the operations that determine the wanted storages, without those whose results are overwritten later."""
    needed, alive = set(), set(wanted)
    for at in range(len(operations) - 1, -1, -1):
        changed = operations[at].changed()
        if changed & alive:
            needed.add(at)
            alive = (alive - changed) | operations[at].read()
    return needed


def _outline_tensors(values: object) -> Any:
    """Return nested arguments with outlines in place of meta tensors."""
    return tree_map(
        lambda value: _Outline.of(value) if isinstance(value, Tensor) and value.device.type == "meta" else value, values
    )


def _deferred_device(value: object) -> object:
    """Return the meta device in place of the CPU, and any other value unchanged."""
    return _META if isinstance(value, torch.device | str) and value in (_CPU, "cpu") else value


def _is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device, even where that is hidden."""
    with DisableTorchFunction():
        return tensor.is_meta


def _collect_memories(values: object) -> set[int]:
    return {value.memory for value in tree_leaves(values) if isinstance(value, _Outline)}
