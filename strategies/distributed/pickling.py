"""What travels between the caller and its worker processes: by value, so that ``__main__`` need not be importable."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from ..errors import ConfigError

_DEPTH = 8  # levels of attributes and items below a part that are searched for what cannot travel


def pack(
    value: Any,
    name: str = "the function",
    parts: Mapping[str, object] | None = None,
    modules: set[str] | None = None,
) -> bytes:
    """Return `value` as bytes, with everything that it refers to and that is defined in ``__main__``.

    Args:
        value: what is to travel.
        name: what errors call it.
        parts: what it holds, by name; to say which attribute of which part cannot travel.
        modules: gets the names of the modules that have to be imported where it arrives.

    Raises:
        ConfigError: for what cannot be pickled.
    """
    try:
        with _by_value(_home(value)):
            return _packed(value, set() if modules is None else modules)
    except Exception as error:
        path, culprit = find_culprit({**(parts or {}), name: value}) or (name, value)
        raise ConfigError(
            f"{path} ({type(culprit).__name__}) cannot travel between processes: {error}; "
            "create it in setup(), which runs in each process."
        ) from error


def _packed(value: Any, modules: set[str]) -> bytes:
    import cloudpickle

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType):
                modules.add(obj.__name__)
            elif isinstance(obj, type | FunctionType):
                modules.add(obj.__module__)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Packer(buffer).dump(value)
    return buffer.getvalue()


def installed(modules: Iterable[str]) -> list[str]:
    """Return those of modules, and of what the user's own among them have imported, that are of installed packages."""
    own = [name for name in modules if not _is_installed(name)]
    inside = (value for name in own for value in vars(sys.modules.get(name, object)).values())
    imported = {one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in inside}
    return sorted(name for name in {*modules, *imported} if isinstance(name, str) and _is_installed(name))


def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(_places())


@functools.cache
def _places() -> tuple[str, ...]:
    """Return where packages are installed."""
    return sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


def _home(value: Any) -> str | None:
    """Return the name of the module in which a function, or the class of an object, is defined."""
    while isinstance(value, functools.partial):
        value = value.func
    value = value.__self__ if isinstance(value, MethodType) else value
    return getattr(value, "__module__", None)


@contextlib.contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    """Have a module travel by value that only this process can import: loaded from a file, as pytest may do."""
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


def unpack(data: bytes) -> Any:
    """Return what `pack` was given; a class that this process defined itself stays what it is."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    """Keeps the classes of this process, whose methods cloudpickle would replace by copies."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(_fill_class, found) if name == "_class_setstate" else found


def _fill_class(fill: Callable[[type, Any], type], one: type, state: tuple[dict[str, Any], Any]) -> type:
    # a named tuple that arrives is born with some of its methods
    is_filled = not hasattr(one, "_fields") and any(isinstance(vars(one).get(name), FunctionType) for name in state[0])
    return one if is_filled else fill(one, state)


def find_culprit(roots: Mapping[str, object]) -> tuple[str, object] | None:
    """Return the path and the value of the deepest part that cannot be pickled; None if all can."""
    seen: set[int] = set()
    found = (_search(name, value, _DEPTH, seen) for name, value in roots.items())
    return next(filter(None, found), None)


def _search(path: str, value: object, depth: int, seen: set[int]) -> tuple[str, object] | None:
    if id(value) in seen or _travels(value):
        return None
    seen.add(id(value))
    inside = _inside(path, value) if depth else ()
    found = (_search(inner_path, inner, depth - 1, seen) for inner_path, inner in inside)
    return next(filter(None, found), (path, value))


def _travels(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a __reduce__ raises
        return False
    return True


def _inside(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what an object holds, each with the path by which the user would reach it."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", inner) for index, inner in enumerate(value))
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.args[{index}]", inner) for index, inner in enumerate(value.args))
        yield from ((f"{path}.keywords[{key!r}]", inner) for key, inner in value.keywords.items())
        yield f"{path}.func", value.func
    elif isinstance(value, FunctionType):
        closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in closed if _is_filled(cell))
        used = (name for name in value.__code__.co_names if name in value.__globals__)
        yield from ((name, value.__globals__[name]) for name in used)
    elif not isinstance(value, ModuleType):
        yield from _attributes(path, value)


def _attributes(path: str, value: object) -> Iterator[tuple[str, object]]:
    for name, inner in getattr(value, "__dict__", {}).items():
        # nn.Module keeps these apart and shows them as attributes of its own
        if name in ("_modules", "_parameters", "_buffers"):
            yield from ((f"{path}.{key}", one) for key, one in inner.items())
        else:
            yield f"{path}.{name}", inner


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - the only way to ask
    except ValueError:
        return False
    return True
