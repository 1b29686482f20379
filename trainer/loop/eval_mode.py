"""Eval mode: the submodules that a fit finds in it, as ``from_pretrained`` leaves them, and would train so."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Final

from torch import nn

from ...strategies.module.own_code import names_in
from ...strategies.torch_internals.modules import Dropout
from ..session.session import Session

_MOST_NAMED: Final = 3
_PACKAGE: Final = __name__.partition(".")[0]


def left_in_eval_mode(module: nn.Module) -> list[str]:
    """Return the names of the submodules in eval mode that are trained, and that compute something else in it.

    Those that are frozen are left out, with what is inside them: freezing puts them into eval mode on purpose.
    """
    return [
        name for name, part in _trained_parts(module, "", is_frozen=False) if not part.training and _asks_for_mode(part)
    ]


def _trained_parts(module: nn.Module, name: str, *, is_frozen: bool) -> Iterator[tuple[str, nn.Module]]:
    parameters = list(module.parameters())
    is_frozen = not any(parameter.requires_grad for parameter in parameters) if parameters else is_frozen
    if is_frozen:
        return
    yield name, module
    for own, child in module.named_children():
        yield from _trained_parts(child, f"{name}.{own}".lstrip("."), is_frozen=is_frozen)


def _asks_for_mode(module: nn.Module) -> bool:
    if isinstance(module, Dropout) and module.p == 0:
        return False
    kind: object = type(module)  # mypy takes no type for hashable
    return _uses_mode(kind)


@functools.lru_cache(maxsize=1024)
def _uses_mode(kind: type) -> bool:
    """Return whether the code of a class asks for ``training``."""
    return any(
        "training" in names_in(value.__code__).used
        for each in kind.__mro__
        if each is not nn.Module and not each.__module__.startswith((_PACKAGE, "torch.distributed"))
        for value in vars(each).values()
        if isinstance(value, FunctionType)
    )


class EvalInSteps:
    """Warns, after the first step, of submodules that a step has put into eval mode and left there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        parts = session.module.named_modules() if session.strategy.rank == 0 else ()
        self._training = [(name, part) for name, part in parts if part.training and _asks_for_mode(part)]

    def look(self) -> None:
        """Warn if it is due."""
        left = [name or "itself" for name, part in self._training if not part.training]
        self._training = []
        if left:
            warnings.warn(
                f"{left[0]} of {type(self._session.module).__name__} is in eval mode since the first step, as eval() "
                "was called in it: dropout is off, and normalization uses stored averages; call train() afterwards, or "
                "eval() in __init__ if it is meant to be so.",
                stacklevel=2,
            )


def warn_of_overridden_train(session: Session) -> None:
    """Warn of a ``train`` of the module's own that would set other modes: a fit leaves modes as they are."""
    module = session.module
    if type(module).train is nn.Module.train or session.strategy.rank:
        return
    modes = {part: part.training for part in module.modules()}
    module.train()
    others = [name for name, part in module.named_modules() if part.training != modes[part]]
    for part, mode in modes.items():
        part.training = mode
    if others:
        warnings.warn(
            f"{type(module).__name__}.train sets another mode for {others[0] or 'the module'!s}, but training does not "
            "call it, and leaves each submodule in its mode: call self.train() at the end of __init__.",
            stacklevel=2,
        )


def warn_of_eval_mode(session: Session, names: Sequence[str]) -> None:
    """Warn, as the first epoch begins, of submodules that are still in the eval mode in which the fit found them."""
    parts = {name: session.module.get_submodule(name) for name in names}
    still = [f"{name or 'itself'} ({type(part).__name__})" for name, part in parts.items() if not part.training]
    if not still or session.strategy.rank:
        return
    listed = ", ".join(still[:_MOST_NAMED]) + (", ..." if len(still) > _MOST_NAMED else "")
    warnings.warn(
        f"Found {len(still)} module(s) in eval mode at the start of training, where dropout is off and normalization "
        f"uses stored averages: {listed}. from_pretrained leaves models so: call .train() on what is to be trained, "
        "or freeze it (requires_grad_(False)); if it is meant to be so, ignore this warning.",
        stacklevel=2,
    )
