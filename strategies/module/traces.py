"""Traceless: user code runs inside it, and what that code has changed is as before afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .own_code import is_own_code, is_own_object, names_in
from .put_back import PutBack, namespace_put_back, put_back_of, restore_all, slots_put_back
from .random_streams import RandomStreams

_MOST: Final = 50_000
"""How many objects are kept at most, the nearest to the module first."""
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
_METRIC: Final = ("update", "compute", "reset")
"""The methods of a metric object, such as torchmetrics' ``Metric``, whose lists of tensors are only ever extended."""
_BESIDE_HOOKS: Final = ("_hooks_with_kwargs", "_hooks_always_called")
_KEEPING: Final = WeakSet["KeptObjects"]()
"""What those blocks keep that may be entered now."""


class Traceless:
    """Restores on exit, also after an error, all that steps of a module inside the block can be found to have changed.

    Kept are, in place: buffers, tensors, modes, hooks and other attributes of the module and its submodules; what these
    hold, through containers, NumPy arrays, metric objects and objects of the user's classes; random streams and
    generators; and what the module's methods, hooks and `functions` reach by name: globals, closures, defaults, class
    attributes, and functions that they call.

    Not kept are parameters and their gradients; other tensors that require gradients; what optimizers, data sets,
    loaders, loggers, callbacks, the trainer and torch's own objects hold; state that is not in attributes, such as that
    of iterators, and code of installed packages; more than 50,000 objects. Files, prints, messages to other processes
    and databases cannot be undone. The mode of the module is not changed.

    Example:
        with Traceless(module, [module.training_step]) as traceless:
            first = module.training_step(batch, 0)
            traceless.put_back()
            second = module.training_step(batch, 0)  # as if it were the first

    Args:
        module: the module, or the part of one that runs.
        functions: functions that run, and other objects that they may change, such as a batch.
    """

    def __init__(self, module: nn.Module, functions: Iterable[object] = ()) -> None:
        self._module, self._functions = module, tuple(functions)

    def __enter__(self) -> Traceless:
        self._kept = KeptObjects()
        self._kept.keep(self._module, *self._functions)
        self._streams = RandomStreams({p.device for p in self._module.parameters()})
        _KEEPING.add(self._kept)
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Restore everything now."""
        self._kept.put_back()
        self._streams.rewind()


def change_for_good(module: nn.Module, attributes: Mapping[str, object]) -> None:
    """Set attributes of a module that no `Traceless` undoes, such as what Echelon finds out in a first step."""
    vars(module).update(attributes)
    for kept in _KEEPING:
        kept.note_change(module, attributes)


class KeptObjects:
    """Objects and what they reach, each kept once however often it occurs.

    Args:
        parameters: whether to keep parameters as well, and other tensors that are trained; then all objects are kept,
            however many.
        device: where copies of tensors are kept; None for the tensors' own.
    """

    def __init__(self, *, parameters: bool = False, device: torch.device | None = None) -> None:
        self._parameters, self._device = parameters, device
        self._seen: dict[int, object] = {}
        """Objects by identity, kept alive so that no other object gets the same identity."""
        self._put_backs: list[PutBack] = []
        self._waiting: deque[object] = deque()
        self._attributes: dict[int, dict[str, object]] = {}
        """Those to which modules are put back, by the identity of a module."""
        self._called: set[str] = set()
        """The names that code uses, of which each may be a method."""
        self._methods: dict[str, list[object]] = {}
        """By name, those of the classes of kept objects that no code has used so far."""

    def keep(self, *values: object) -> None:
        """Keep these objects and what they reach, the nearest first."""
        self._waiting.extend(values)
        while self._waiting and (self._parameters or len(self._seen) < _MOST):
            value = self._waiting.popleft()
            if type(value) not in _PLAIN and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value)
        self._waiting.clear()

    def keep_attributes(self, owner: object) -> None:
        """Keep the attributes of an object whatever its class, and what they reach."""
        if isinstance(owner, nn.Module):
            self.keep(owner)
            return
        self._seen[id(owner)] = owner
        self._put_backs.append(namespace_put_back(vars(owner)))
        self.keep(*vars(owner).values())

    @property
    def modules(self) -> list[nn.Module]:
        """The modules among the kept objects."""
        return [one for one in self._seen.values() if isinstance(one, nn.Module)]

    def note_change(self, module: nn.Module, attributes: Mapping[str, object]) -> None:
        """Note what else a module is put back to, if it is kept."""
        if id(module) in self._attributes:
            self._attributes[id(module)].update(attributes)

    def put_back(self) -> None:
        """Restore everything, and only then raise an error that occurred meanwhile."""
        errors: list[Exception] = []
        for put_back in self._put_backs:
            try:
                put_back()
            except Exception as error:  # noqa: BLE001 - the others must be restored as well
                errors.append(error)
        if errors:
            raise errors[0]

    # --- one object --------------------------------------------------------------------------------------------------

    def _visit(self, value: object) -> None:
        if isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, Tensor):
            self._visit_tensor(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, MethodType):
            self._waiting.extend((value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append(value.__func__)
        elif isinstance(value, property):
            self._waiting.extend((value.fget, value.fset))
        elif isinstance(value, partial):
            self._waiting.extend((value.func, value.args, value.keywords))
        elif not isinstance(value, ModuleType):
            self._visit_object(value)

    def _visit_tensor(self, tensor: Tensor) -> None:
        is_trained = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        if not is_trained or (self._parameters and tensor.is_leaf):
            self._append(put_back_of(tensor, self._device))

    def _append(self, put_back: PutBack | None) -> None:
        if put_back is not None:
            self._put_backs.append(put_back)

    def _visit_object(self, value: Any) -> None:
        self._append(put_back_of(value))
        elements: Iterable[object] = ()
        if isinstance(value, dict):
            elements = value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            elements = value
        self._waiting.extend(element for element in elements if type(element) not in _PLAIN)
        kind = type(value)
        if not is_own_object(kind):
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._put_backs.append(namespace_put_back(attributes))
            self._waiting.extend(attributes.values())
        put_back, values = slots_put_back(value)
        if values:
            self._put_backs.append(put_back)
            self._waiting.extend(values)
        self._waiting.append(kind)

    # --- modules -----------------------------------------------------------------------------------------------------

    def _visit_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # has its attributes elsewhere
            self._put_backs.append(partial(setattr, module, "training", module.training))
            self._waiting.extend((*module.buffers(), *module.children()))
            return
        attributes = vars(module)
        if isinstance(module, LazyModuleMixin):  # becomes another class in its first forward, for good
            self._put_backs.append(namespace_put_back(attributes, ["training"]))
            return
        self._attributes[id(module)] = before = dict(attributes)
        self._put_backs.append(partial(restore_all, attributes, before))
        is_metric = all(callable(getattr(type(module), name, None)) for name in _METRIC)
        for name, value in attributes.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                self._put_backs.append(partial(_put_back_hooks, value, dict(value)))
                self._waiting.extend(value.values())
            elif is_metric and isinstance(value, list):
                self._append(put_back_of(value))
                self._seen[id(value)] = value
            elif name.endswith(_BESIDE_HOOKS) or (name == "_parameters" and not self._parameters):
                pass  # fully_shard exchanges parameters as it needs them
            else:
                self._waiting.append(value)
        self._waiting.append(type(module))

    # --- code --------------------------------------------------------------------------------------------------------

    def _visit_class(self, kind: type) -> None:
        """Keep the attributes of a class and its bases, as far as they are the user's, and note their methods."""
        for each in kind.__mro__:
            if _has_own_code(each) and (each is kind or id(each) not in self._seen):
                self._seen[id(each)] = each
                self._keep_class(each)

    def _keep_class(self, kind: type) -> None:
        named = {name: value for name, value in vars(kind).items() if not _is_special(name)}
        self._put_backs.append(partial(_put_back_class, kind, named))
        for name, value in vars(kind).items():
            if not isinstance(value, FunctionType | property | staticmethod | classmethod):
                self._waiting.extend((value,) if name in named else ())
            elif name in self._called or name == "forward" or (_is_special(name) and name != "__init__"):
                self._waiting.append(value)
            else:
                self._methods.setdefault(name, []).append(value)

    def _visit_function(self, function: FunctionType) -> None:
        """Keep what a function of the user reaches by name."""
        if not is_own_code(function.__module__) or not is_own_code(function.__globals__.get("__name__")):
            return
        names = names_in(function.__code__)
        self._keep_names(function.__globals__, names.used, names.assigned)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty so far
                continue
            self._put_backs.append(partial(setattr, cell, "cell_contents", value))
            self._waiting.append(value)
        self._waiting.extend((function.__defaults__, function.__kwdefaults__, vars(function)))
        for name in names.used - self._called:
            self._called.add(name)
            self._waiting.extend(self._methods.pop(name, ()))

    def _keep_names(
        self, namespace: dict[str, object], names: Iterable[str], assigned: Iterable[str] = frozenset()
    ) -> None:
        found = {name for name in names if name in namespace}
        self._put_backs.append(namespace_put_back(namespace, found | set(assigned)))
        for name in found:
            value = namespace[name]
            if isinstance(value, ModuleType):
                if is_own_code(value.__name__) and vars(value) is not namespace:
                    self._keep_names(vars(value), set(names) - {name})
            else:
                self._waiting.append(value)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _has_own_code(kind: type) -> bool:
    """Return whether a class is the user's, or made of one: fully_shard makes one of each class that it shards."""
    return any(is_own_code(each.__module__) for each in kind.__mro__)


def _put_back_class(kind: type, before: dict[str, object]) -> None:
    for name in [name for name in vars(kind) if name not in before and not _is_special(name)]:
        type.__delattr__(kind, name)
    for name, value in before.items():
        if vars(kind).get(name, before) is not value:
            type.__setattr__(kind, name, value)


def _put_back_hooks(hooks: dict[int, object], before: dict[int, object]) -> None:
    """Restore hooks, except that those stay which torch or Echelon has added, as fully_shard does in a first step."""
    added = {key: hook for key, hook in hooks.items() if key not in before and is_own_hook(hook)}
    after = before | added
    if list(hooks.items()) != list(after.items()):
        hooks.clear()
        hooks.update(after)


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook is torch's or Echelon's; what other libraries note of theirs is put back as well."""
    while isinstance(hook, partial):
        hook = hook.func
    package = (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
    return package in ("torch", __name__.partition(".")[0])
