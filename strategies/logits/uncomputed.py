"""UncomputedLogits: stands for the output of a head, remembers what is done with it, and computes its cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import ModuleError
from ..targets.cross_entropy_call import CrossEntropyCall
from .chunked_loss import Change, CrossEntropy

_OF_SHAPE: Final = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
_SAME: Final = frozenset(("contiguous", "clone"))
_TO_DTYPE: Final = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_OF_ELEMENTS: Final[Mapping[str, Callable[..., Tensor]]] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__"), torch.mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__itruediv__"), torch.div),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__"), torch.add),
    **dict.fromkeys(("sub", "subtract", "__sub__", "__isub__"), torch.sub),
    **dict.fromkeys(("neg", "negative", "__neg__"), torch.neg),
    "tanh": torch.tanh,
    "clamp": torch.clamp,
    "nan_to_num": torch.nan_to_num,
}
"""Functions of each element by itself, which can be applied to the logits of a chunk."""
_QUESTIONS: Final = frozenset(("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size"))
_IN_PLACE: Final = frozenset(("__imul__", "__itruediv__", "__iadd__", "__isub__"))

Compute = Callable[[CrossEntropy, Tensor], Tensor]


def _make_refusing_method(name: str) -> Callable[..., object]:
    """Return a method that raises the error for something that cannot be done."""

    def refused(self: UncomputedLogits, *args: object) -> object:
        raise self.refusal(name)

    return refused


class UncomputedLogits:
    """The output of a head that has not been called.

    Functions of torch and methods of tensors change what it stands for: its shape, as long as the classes stay the last
    dimension, a selection of tokens, and each element by itself. ``F.cross_entropy`` calls the head for the loss.

    Args:
        shape: of the logits.
        dtype: of the logits.
        device: of the logits.
        compute: calls the head; returns the total loss for targets in the shape of the head's output, without classes.
        owner: the model, for errors.
        on_loss: is given the mean loss, the total and the count.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        compute: Compute,
        owner: str,
        on_loss: Callable[[Tensor, Tensor, Tensor], None],
    ) -> None:
        self._place: Tensor = torch.arange(shape[:-1].numel(), device=device).view(shape[:-1])
        """Where each token is in the output of the head, flattened."""
        self._tokens, self._num_classes = shape[:-1], shape[-1]
        self.dtype, self.device = dtype, device
        self._compute, self._owner, self._on_loss = compute, owner, on_loss
        self._changes: tuple[Change, ...] = ()
        self._aliases = [1]
        """How many of these share memory, as views of each other do."""
        self._classes_second = False
        """Whether the classes are the dimension 1, as the cross-entropy of tensors with more than 2 takes them."""

    # --- what may be asked -------------------------------------------------------------------------------------------

    requires_grad = True
    layout = torch.strided
    is_meta = is_sparse = is_quantized = is_nested = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        own, classes = self._place.shape, self._num_classes
        return torch.Size((own[0], classes, *own[1:]) if self._classes_second else (*own, classes))

    @property
    def ndim(self) -> int:
        """The number of their dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"UncomputedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __bool__(self) -> bool:
        raise self.refusal("bool")

    # --- what is done with them --------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"UncomputedLogits has no attribute {name!r}, as no tensor has.")
        if not callable(getattr(Tensor, name)):
            raise self.refusal(name)
        return lambda *args, **kwargs: self._call(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, cls)]
        if not found:  # inside of a list, as for torch.cat
            found = [one for arg in args if isinstance(arg, list | tuple) for one in arg if isinstance(one, cls)]
            raise found[0].refusal(func.__name__)
        own = found[0]
        return own.applied(func, args, kwargs)

    def applied(self, function: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Return what a function of torch returns for them."""
        if function is not F.cross_entropy:
            return self._call(function.__name__, args, kwargs)
        return self._cross_entropy(CrossEntropyCall.of(args, kwargs))

    def __getitem__(self, index: Any) -> UncomputedLogits:
        parts = list(index) if isinstance(index, tuple) else [index]
        dims = [_dims_of(part) for part in parts]
        if Ellipsis not in [part for part in parts if part is None or part is Ellipsis]:
            parts, dims = [*parts, Ellipsis], [*dims, 0]
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        if self._classes_second or sum(dims) > self.ndim:
            raise self.refusal("__getitem__")
        rest = parts[at + 1 :]
        if sum(dims[at + 1 :]) or sum(dims[:at]) == self.ndim:  # the last part is of the classes
            last = max(place for place, number in enumerate(dims) if number)
            every = (0, self._num_classes, 1)
            if not isinstance(parts[last], slice) or parts[last].indices(self._num_classes) != every:
                raise self.refusal("a selection of classes")
            rest = parts[last + 1 :]
            del parts[last]
        if any(part is None for part in rest):
            raise self.refusal("a dimension after the classes")
        return self._like(_place=self._place[tuple(parts)])

    def __setitem__(self, index: object, value: object) -> None:
        raise self.refusal("an assignment to elements")

    __rsub__, __rtruediv__, __pow__, __rpow__, __matmul__, __rmatmul__, __abs__, __float__, __int__, __array__ = (
        _make_refusing_method(name)
        for name in ("rsub", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "abs", "float", "int", "numpy")
    )
    __lt__, __le__, __gt__, __ge__ = (_make_refusing_method(name) for name in ("lt", "le", "gt", "ge"))

    def __mul__(self, other: object) -> object:
        return self._call("__mul__", (self, other), {})

    def __imul__(self, other: object) -> object:
        return self._call("__imul__", (self, other), {})

    def __itruediv__(self, other: object) -> object:
        return self._call("__itruediv__", (self, other), {})

    def __iadd__(self, other: object) -> object:
        return self._call("__iadd__", (self, other), {})

    def __isub__(self, other: object) -> object:
        return self._call("__isub__", (self, other), {})

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> object:
        return self._call("__truediv__", (self, other), {})

    def __add__(self, other: object) -> object:
        return self._call("__add__", (self, other), {})

    __radd__ = __add__

    def __sub__(self, other: object) -> object:
        return self._call("__sub__", (self, other), {})

    def __neg__(self) -> object:
        return self._call("neg", (self,), {})

    def _call(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Apply a function of torch, or a method, to the logits."""
        is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        name = name.removesuffix("_") if is_in_place and not name.startswith("__") else name
        rest = args[1:]
        if name in _QUESTIONS:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)(*rest, **kwargs)
        if not args or (args[0] is not self and name not in ("mul", "add")):
            raise self.refusal(name)
        if name == "__getitem__":
            return self[rest[0]]
        if name in _SAME:
            return self._like()
        if name in _TO_DTYPE or name in ("to", "type", "type_as"):
            return self._converted(_TO_DTYPE.get(name), rest, kwargs)
        if name in _OF_SHAPE:
            return self._reshaped(name, rest, kwargs)
        if name in ("transpose", "swapaxes", "permute", "movedim"):
            return self._with_classes_second(name, rest, kwargs)
        if name in _OF_ELEMENTS:
            at = next(place for place, one in enumerate(args) if one is self)
            operands = [*args[:at], *args[at + 1 :]]
            changed = self._changed(_OF_ELEMENTS[name], name, operands, kwargs)
            if not is_in_place:
                return changed
            if self._aliases[0] > 1:
                raise self.refusal(f"{name} in place, where other tensors have the same memory")
            vars(self).update(vars(changed))
            return self
        raise self.refusal(name)

    def _like(self, **others: object) -> UncomputedLogits:
        """Return others that differ in these attributes, and may share memory with these unless they are changed."""
        if "_changes" not in others:
            self._aliases[0] += 1
        own = object.__new__(UncomputedLogits)
        vars(own).update(vars(self), **others)
        return own

    def _converted(
        self, dtype: torch.dtype | None, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> UncomputedLogits:
        """Return them in another dtype; they are computed in float32 at least, and not in less than their own."""
        for one in (*args, *kwargs.values()):
            like = one.dtype if isinstance(one, Tensor | UncomputedLogits) else one
            dtype = like if isinstance(like, torch.dtype) else dtype
        if dtype is None:
            return self._like()
        if not dtype.is_floating_point:
            raise self.refusal(f"a conversion to {dtype}")
        if dtype.itemsize <= 4:
            return self._like(dtype=dtype)
        changes = (*self._changes, lambda logits, columns: logits.to(dtype))
        return self._like(dtype=dtype, _changes=changes, _aliases=[1])

    def _reshaped(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> UncomputedLogits:
        shape = getattr(torch.empty(self.shape, device="meta"), name)(*args, **kwargs).shape
        if not shape or shape[-1] != self._num_classes or self._classes_second:
            raise self.refusal(f"{name} to {tuple(shape)}")
        return self._like(_place=self._place.reshape(shape[:-1]))

    def _with_classes_second(
        self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> UncomputedLogits:
        marked = torch.empty([*range(2, self.ndim + 1), 1], device="meta")  # the sizes say where dimensions go
        order = getattr(marked, name)(*args, **kwargs).shape
        if self.ndim < 3 or self._classes_second or tuple(order) != (2, 1, *range(3, self.ndim + 1)):
            raise self.refusal(name)
        return self._like(_classes_second=True)

    def _changed(
        self, change: Callable[..., Tensor], name: str, operands: list[object], kwargs: Mapping[str, object]
    ) -> UncomputedLogits:
        if any(isinstance(value, UncomputedLogits) for value in (*operands, *kwargs.values())) or self._classes_second:
            raise self.refusal(name)
        for value in operands:
            if not isinstance(value, Tensor):
                continue
            has_classes = value.ndim > 0 and value.shape[-1] == self._num_classes and value.numel() == value.shape[-1]
            if value.requires_grad or not (value.numel() == 1 or has_classes):
                of = " with a gradient" if value.requires_grad else f" of shape {tuple(value.shape)}"
                raise self.refusal(f"{name} with a tensor{of}")
        values = [one.detach().reshape(-1) if isinstance(one, Tensor) else one for one in operands]

        def changed(logits: Tensor, columns: slice) -> Tensor:
            own = [_columns_of(one, columns, logits) if isinstance(one, Tensor) else one for one in values]
            return change(logits, *own, **kwargs)

        return self._like(_changes=(*self._changes, changed), _aliases=[1])

    # --- their loss --------------------------------------------------------------------------------------------------

    def _cross_entropy(self, call: CrossEntropyCall) -> Tensor:
        target = call.target
        if target.is_floating_point():
            raise self.refusal("cross_entropy with probabilities as targets")
        if call.input is not self or not call.is_of_classes or call.reduction != "mean":
            raise self.refusal(f"cross_entropy with reduction={call.reduction!r}")
        if target.shape != self._place.shape:
            raise ModuleError(
                f"{self._owner} computes a cross-entropy of logits of shape {tuple(self.shape)} and labels of shape "
                f"{tuple(target.shape)}; give each token one label."
            )
        if self._place.numel() > self._tokens.numel():
            raise self.refusal("a repetition of tokens")
        whole = target.new_full((self._tokens.numel(),), call.ignore_index)
        whole[self._place.reshape(-1)] = target.reshape(-1)
        total = self._compute(CrossEntropy(call.ignore_index, call.label_smoothing, call.weight, self._changes), whole)
        count = call.weights().sum().to(total.device)  # a hook may have moved the input of the head
        mean: Tensor = total / torch.where(count > 0, count, 1)
        self._on_loss(mean, total, count)
        return mean

    def refusal(self, what: str) -> ModuleError:
        """Return the error for something that cannot be done while they are not computed."""
        return ModuleError(
            f"{self._owner} does this with its logits, which cannot be done while they are not computed: {what}. The "
            "loss without logits knows scaling, softcapping, a bias, a selection of tokens, and the mean of "
            "F.cross_entropy; return the loss of the model itself: model(**batch).loss."
        )


def _dims_of(part: object) -> int:
    """Return how many dimensions a part of an index stands for."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _columns_of(value: Tensor, columns: slice, like: Tensor) -> Tensor:
    own = value if value.numel() == 1 else value[columns]
    return own.to(device=like.device, dtype=like.dtype)
