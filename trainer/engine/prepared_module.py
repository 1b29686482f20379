"""PreparedModule: a user's module whose calls go through the strategy that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, ModuleError, RunError
from ...strategies.distributed.nested import map_tensors
from ...strategies.placed.placed import Placed
from ...strategies.torch_internals.modules import find_uncompiled
from .step_gradients import StepGradients

_CALL: Final = "__call__"
_CALLS: Final = "_engine_calls"
_HALF: Final = (torch.float16, torch.bfloat16)


class PreparedModule(nn.Module):
    """Becomes a base of the class of a module that an `Engine` has set up, so that it stays the user's object.

    Names, attributes and methods are the module's, also inside it: a method that calls ``self(x)`` goes through the
    strategy, too. (torch's ``fully_shard`` also changes the class of a module.) Copies and pickles are of the plain
    module.
    """

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward in the precision of the engine, so that a backward averages gradients."""
        return vars(self)[_CALLS](_CALL, args, kwargs)

    def run_plainly(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run forward, or a marked method, as the plain module does."""
        if name == _CALL:
            return super().__call__(*args, **kwargs)
        return getattr(type(self), name)(self, *args, **kwargs)

    run_synchronized = run_plainly  # under this name, strategies synchronize gradients in the following backward

    def mark_forward_method(self, method: str | Callable[..., object]) -> None:
        """Make calls of a method of the module go through the strategy, as those of forward do.

        Use it for methods that use submodules or parameters without calling the module itself.

        Raises:
            ModuleError: if the module's class has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        if not callable(getattr(type(self), name, None)):
            raise ModuleError(
                f"mark_forward_method({name!r}) must name a method that {type(self).__name__} defines; give another."
            )
        calls = vars(self)[_CALLS]
        calls.marked.add(name)
        vars(self)[name] = lambda *args, **kwargs: calls(name, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        vars(self)[_CALLS].refuse_copy()
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        left_out = {_CALLS, *vars(self)[_CALLS].marked}
        kept = {name: value for name, value in state.items() if name not in left_out}
        return _make_empty, (type(self).__mro__[2],), kept, *rest


class ModuleCalls:
    """Calls of a prepared module: through the strategy, in its precision.

    Args:
        placed: the module, as it was set up.
        gradients: is told of calls, and of those that may be followed by a backward.
    """

    def __init__(self, placed: Placed, gradients: StepGradients, *, is_sharded: bool) -> None:
        self._module: Any = placed.module
        self._precision, self._device_type = placed.precision, placed.device.type
        self._plain, self._synchronized = placed.step_fn("run_plainly"), placed.step_fn("run_synchronized")
        self._gradients = gradients
        self._is_sharded, self._strategy_name = is_sharded, placed.site.name
        self._is_inside = False
        self.marked: set[str] = set()
        """The methods that also go through the strategy."""

    def refuse_copy(self) -> None:
        """Refuse to copy or pickle a module of which this rank holds a part.

        Raises:
            RunError: if its parameters are sharded.
        """
        if self._is_sharded:
            raise RunError(
                f"{type(self._module).__name__} cannot be copied or pickled after engine.setup with strategy="
                f"{self._strategy_name!r}: this rank holds shards of it. Copy it before setup; or engine.save it, "
                "build another one, and load into that what echelon.load_weights(path) returns."
            )

    def __call__(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        if self._is_inside:  # a method of the module calls it
            return self._module.run_plainly(name, args, kwargs)
        precision = self._precision
        if precision.param_dtype is not None:
            args, kwargs = precision.convert_batch((args, kwargs))  # type: ignore[misc]
        run = self._plain
        self._gradients.note_call(self._module)
        if torch.is_grad_enabled():
            self._gradients.note_forward()
            run = self._synchronized
        self._is_inside = True
        try:
            output = run(name, args, kwargs)
        finally:
            self._is_inside = False
        if precision.autocast_dtype is not None and not torch.is_autocast_enabled(self._device_type):
            output = map_tensors(_as_float32, output)  # the loss is computed outside of autocast, in full precision
        return output


def _make_empty(plain: type[nn.Module]) -> nn.Module:
    """Return an empty module, which a copy or a pickle fills in."""
    return plain.__new__(plain)


def unprepare_copy(copied: nn.Module, prepared: nn.Module) -> None:
    """Let the calls of a copy of a module, or of a part of one, run as those of the plain module, if it is prepared."""
    if isinstance(prepared, PreparedModule):
        copied.__class__ = type(prepared).__mro__[2]
        for name in (_CALLS, *vars(prepared)[_CALLS].marked):
            vars(copied).pop(name, None)


def check_plain(module: object) -> None:
    """Check that a module can be set up.

    Raises:
        ConfigError: if it is not a module, is compiled as a whole, or was already set up.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"setup(module, *optimizers) must get a torch.nn.Module first, got {module!r:.80}, a "
            f"{type(module).__name__}; set optimizers up together with their module."
        )
    if isinstance(module, PreparedModule):
        raise ConfigError(
            f"{type(module).__name__} was set up before; call setup once for each module, or set up a copy.deepcopy."
        )
    inner = find_uncompiled(module)
    if inner is not None:
        raise ConfigError(
            f"setup must get the module inside torch.compile, got torch.compile({type(inner).__name__}); call "
            "module.compile() before setup, which compiles it in place."
        )


def prepare_module(placed: Placed, gradients: StepGradients, *, is_sharded: bool) -> None:
    """Make the calls of a module go through what has placed it; one that `is_sharded` cannot be copied."""
    module = placed.module
    plain = type(module)
    names: dict[str, object] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    names["__doc__"] = plain.__doc__
    if is_sharded:  # torch's own refusal does not say what to do
        names["__deepcopy__"] = lambda self, memo: vars(self)[_CALLS].refuse_copy()
    module.__class__ = type(plain.__name__, (PreparedModule, plain), names)
    vars(module)[_CALLS] = ModuleCalls(placed, gradients, is_sharded=is_sharded)


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
