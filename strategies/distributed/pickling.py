"""Pickling by value between the caller and its workers, so that ``__main__`` need not be importable."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import IO, Any, Final

import torch
from torch.storage import TypedStorage

from ...common.errors import ConfigError, ProcessError
from ..torch_internals.modules import find_child_dict, was_initialized
from ..torch_internals.tensors import find_hooks, find_memory, set_hooks

_QUALIFIED_NAME: Final = "__qualname__"
PICKLING_ERRORS: Final = (pickle.PicklingError, AttributeError, TypeError)
"""Errors that Python raises for objects that cannot be pickled."""

_MAX_DEPTH = 8  # levels of attributes and items to search for an object that cannot be pickled


def is_picklable(obj: object) -> bool:
    """Return whether `pickle` takes an object, without what this module adds to it."""
    try:
        pickle.dumps(obj)
    except (*PICKLING_ERRORS, RuntimeError):
        return False
    return True


def pack_value(
    value: object,
    name: str = "the function",
    parts: Mapping[str, object] | None = None,
    modules: set[str] | None = None,
) -> bytes:
    """Return the bytes that `pack_into` would write."""
    buffer = io.BytesIO()
    pack_into(buffer, value, name, parts, modules)
    return buffer.getvalue()


def pack_into(
    file: IO[bytes],
    value: object,
    name: str = "the function",
    parts: Mapping[str, object] | None = None,
    modules: set[str] | None = None,
) -> None:
    """Write a value to a file, with everything it refers to that is defined in ``__main__``.

    Its tensors are not copied in memory.

    Args:
        file: a file opened for writing.
        value: the value to pickle.
        name: its name in errors.
        parts: objects that it holds, by name; an error about an attribute of one starts from that name.
        modules: receives the names of the modules that have to be imported to unpickle it.

    Raises:
        ConfigError: if it cannot be pickled.
        ProcessError: if the file has no room.
        MemoryError: if there is not enough memory.
    """
    try:
        with _by_value(_defining_module(value)):
            _pack_into(file, value, set() if modules is None else modules)
    except MemoryError:
        raise  # not the fault of one value, and a search for a culprit would take even more memory
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ProcessError(
                f"{name} cannot be sent to other processes through the temporary folder {tempfile.gettempdir()!r} "
                f"({error.strerror}); make room there, or set TMPDIR to another folder."
            ) from error
        path, culprit = find_culprit({**(parts or {}), name: value}) or (name, value)
        raise ConfigError(
            f"{path} ({type(culprit).__name__}) cannot be sent to other processes: {error}; "
            "create it in setup(), which runs in each process."
        ) from error


def check_packs(value: object, name: str) -> None:
    """Check that a value can be packed, without keeping the bytes.

    Raises:
        ConfigError: if it cannot be pickled.
    """
    with open(os.devnull, "wb") as file:
        pack_into(file, value, name)


def _pack_into(file: IO[bytes], value: object, modules: set[str]) -> None:
    import cloudpickle

    # every tensor makes a storage object of its own, also those that share memory; kept, so that no address is reused
    memories: dict[tuple[torch.device, int, int], _Memory] = {}

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> object:
            if isinstance(obj, TypedStorage | torch.UntypedStorage):
                memory = find_memory(obj)
                if memory.device.type != "meta" and memory.nbytes():
                    dtype = obj.dtype if isinstance(obj, TypedStorage) else torch.uint8  # the tensor knows its own
                    key = memory.device, memory.data_ptr(), memory.nbytes()
                    return _make_storage, (memories.setdefault(key, _Memory(memory)), dtype)
            if isinstance(obj, _Memory):
                # torch would make a copy, which the pickler keeps, and could not read back uint16 or float8; and each
                # process that unpacks it would open the sender's device
                data: Any = torch.empty(0, dtype=torch.uint8).set_(obj.storage.cpu()).numpy()
                return _filled_memory, (pickle.PickleBuffer(data),)
            if isinstance(obj, torch.nn.Parameter) and (hooks := _hooks_of(obj)):
                # torch leaves hooks out; they are set last, since they may refer to the module
                return (*obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2], hooks, None, None, set_hooks)
            if isinstance(obj, torch.nn.Module) and was_initialized(obj) and "parametrizations" in find_child_dict(obj):
                # torch refuses, because of the class that it has made for this module; cloudpickle can send that. What
                # the module's own class leaves out is left out, as the weak references of an LSTM
                kind = type(obj)
                state_of: Any = kind.__mro__[1].__getstate__
                return _make_without_init, (kind,), state_of(obj)
            if isinstance(obj, CodeType):
                return _with_file_name(self.dispatch_table[CodeType](obj), obj.co_filename)
            if isinstance(obj, ModuleType):
                modules.add(obj.__name__)
            elif isinstance(obj, type | FunctionType):
                modules.add(obj.__module__)
            reduced = super().reducer_override(obj)
            return _with_qualified_name(reduced, obj) if isinstance(obj, type) else reduced

    Packer(file).dump(value)


def _with_file_name(reduced: tuple[object, tuple[object, ...]], name: str) -> tuple[object, tuple[object, ...]]:
    """Return what makes code again, with the name of its file: from 3.1.3 on, cloudpickle writes another one."""
    make, arguments = reduced
    return make, tuple(name if isinstance(one, str) and one == "<dynamic-code>" else one for one in arguments)


def _with_qualified_name(reduced: Any, kind: type) -> object:
    """Return what makes a class again, with its qualified name: cloudpickle makes ``f.<locals>.C`` a ``C``."""
    if reduced is NotImplemented or reduced[0].__name__ != "_make_skeleton_class":
        return reduced
    make, arguments, (attributes, slots), *rest = reduced
    return make, arguments, ({**attributes, _QUALIFIED_NAME: kind.__qualname__}, slots), *rest


def _make_without_init(kind: Any) -> object:
    return kind.__new__(kind)


def _hooks_of(parameter: torch.nn.Parameter) -> dict[str, object]:
    """Return the hooks of users on a parameter, by the attribute in which torch keeps them."""
    # a mark of torch's for those that are not the user's
    return {
        name: hooks
        for name, hooks in find_hooks(parameter).items()
        if not any(hasattr(hook, "__torch_unserializable__") for hook in hooks.values())
    }


class _Memory:
    """The memory of tensors that share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def _filled_memory(data: bytearray) -> torch.UntypedStorage:
    """Return memory of its own, which can be resized like any other."""
    return torch.frombuffer(data, dtype=torch.uint8).clone().untyped_storage()


def _make_storage(memory: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Return the storage of one of the tensors that share this memory."""
    return TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def installed_modules(modules: Iterable[str]) -> list[str]:
    """Return the modules of installed packages among `modules`, and among those that the others import."""
    users = [name for name in modules if not is_installed(name)]
    values = [value for name in users for value in vars(sys.modules.get(name, object)).values()]
    imported = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) for value in values
    }
    return sorted(name for name in {*modules, *imported} if isinstance(name, str) and is_installed(name))


def is_installed(name: str) -> bool:
    """Return whether a module is one of an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _defining_module(value: Any) -> str | None:
    """Return the name of the module in which a function, or the class of an object, is defined."""
    while isinstance(value, functools.partial):
        value = value.func
    value = value.__self__ if isinstance(value, MethodType) else value
    return getattr(value, "__module__", None)


@contextlib.contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    """Pickle a module by value if only this process can import it: one loaded from a file, as pytest may do."""
    import cloudpickle

    module = sys.modules.get(name or "")
    if module is None or module.__name__ == "__main__" or _is_importable(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    parent = name.rpartition(".")[0]
    if parent and not _is_importable(parent):
        return False
    path = getattr(sys.modules.get(parent), "__path__", None)
    return any(finder.find_spec(name, path) is not None for finder in sys.meta_path)


def unpack_value(data: bytes) -> Any:
    """Return the value given to `pack_value`; classes that this process has defined are not replaced by copies."""
    return unpack_from(io.BytesIO(data))


def unpack_from(file: Any) -> object:
    """Return the value that `pack_into` wrote to a file, which may be memory-mapped."""
    return _LocalClassUnpickler(file).load()


class _LocalClassUnpickler(pickle.Unpickler):
    """Unpickler that keeps the classes of this process; cloudpickle would replace their methods with copies."""

    def find_class(self, module: str, name: str) -> object:
        value = super().find_class(module, name)
        return functools.partial(_set_class_state, value) if name == "_class_setstate" else value


def _set_class_state(
    original: Callable[[type, object], type], cls: type, state: tuple[dict[str, object], object]
) -> type:
    # a class that was just unpickled has no methods yet, except a named tuple, which is created with some, and those
    # that a base's __init_subclass__ adds
    own, names = vars(cls), state[0].keys() - {_QUALIFIED_NAME}
    is_local = not hasattr(cls, "_fields") and any(isinstance(own.get(name), FunctionType) for name in names)
    return cls if is_local and names <= own.keys() else original(cls, state)


def find_culprit(roots: Mapping[str, object]) -> tuple[str, object] | None:
    """Return the path and value of the innermost object that cannot be pickled; None if all can."""
    seen: set[int] = set()
    culprits = (_find_unsendable(name, value, _MAX_DEPTH, seen) for name, value in roots.items())
    return next(filter(None, culprits), None)


def _find_unsendable(path: str, value: object, depth: int, seen: set[int]) -> tuple[str, object] | None:
    if id(value) in seen or is_sendable(value):
        return None
    seen.add(id(value))
    children = _held_objects(path, value) if depth else ()
    culprits = (_find_unsendable(child_path, child, depth - 1, seen) for child_path, child in children)
    return next(filter(None, culprits), (path, value))


def is_importable(value: object) -> bool:
    """Return whether Python's own pickle takes a value, which sends functions and classes by their names."""
    return _is_taken(value, pickle.dumps)


def is_sendable(value: object) -> bool:
    """Return whether a value can be sent to other processes."""
    return _is_taken(value, lambda value: _pack_into(io.BytesIO(), value, set()))


def _is_taken(value: object, dumps: Callable[[object], object]) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - a __reduce__ may raise anything
        return False
    return True


def _held_objects(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that `value` holds, each with the path at which the user would find it."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.args[{index}]", child) for index, child in enumerate(value.args))
        yield from ((f"{path}.keywords[{key!r}]", child) for key, child in value.keywords.items())
        yield f"{path}.func", value.func
    elif isinstance(value, FunctionType):
        with contextlib.suppress(ValueError):  # a variable has no value yet
            variables = inspect.getclosurevars(value)
            yield from {**variables.globals, **variables.nonlocals}.items()
    elif not isinstance(value, ModuleType):
        yield from _attributes_of_object(path, value)


def _attributes_of_object(path: str, value: object) -> Iterator[tuple[str, object]]:
    for name, child in getattr(value, "__dict__", {}).items():
        # nn.Module keeps these in dictionaries and exposes them as attributes
        if name in ("_modules", "_parameters", "_buffers"):
            yield from ((f"{path}.{key}", inner) for key, inner in child.items())
        else:
            yield f"{path}.{name}", child
