"""Plain builds: a model that ``from_pretrained`` of transformers reads as a whole, inside a deferred initialization."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final

import torch

from ..module.deferred_init import DeferredInit

_MODELS: Final = "transformers.modeling_utils"


@contextmanager
def recording_builds(deferred: DeferredInit) -> Iterator[None]:
    """Build modules inside without allocating memory, see `DeferredInit`; ``from_pretrained`` builds whole ones."""
    with _building_plainly(), deferred.recording():
        yield


@contextmanager
def _building_plainly() -> Iterator[None]:
    """Have ``from_pretrained`` of transformers work inside as outside of all modes, with values of its own.

    It builds on the meta device itself, looks at where tensors are, and then reads the values: none of this can be
    recorded. The random generator is left as it was, since the numbers that it draws are not in the record either.
    """
    finder = _ModelsOfTransformers()
    module = sys.modules.get(_MODELS)
    if module is not None:
        finder.build_plainly(module)
    else:  # importing it takes seconds, which a program that only has a tokenizer would pay for nothing
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(finder)
        finder.undo()


class _ModelsOfTransformers(MetaPathFinder):
    """Finds transformers' module of models if it is imported, and then has its ``from_pretrained`` build plainly."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._original: object = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != _MODELS:
            return None
        spec: Any = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self.build_plainly(module)

        spec.loader.exec_module = execute_and_change
        return spec

    def build_plainly(self, module: Any) -> None:
        """Replace ``PreTrainedModel.from_pretrained`` until `undo`."""
        self._kind = module.PreTrainedModel
        self._original = original = vars(self._kind)["from_pretrained"]

        def from_pretrained(kind: object, *args: Any, **kwargs: Any) -> object:
            build = partial(copy_context().run, original.__func__, kind, *args, **kwargs)
            state = torch.get_rng_state()
            try:
                with ThreadPoolExecutor(1) as pool:  # a thread has no modes
                    return pool.submit(build).result()
            finally:
                torch.set_rng_state(state)

        self._kind.from_pretrained = classmethod(from_pretrained)

    def undo(self) -> None:
        """Put the method back, if it was replaced."""
        if self._kind is not None:
            self._kind.from_pretrained = self._original
            self._kind = None
