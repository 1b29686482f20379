"""Fabric: Lightning's helper for a training loop of one's own, over Echelon's Engine."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.run import Logger
from ...common.errors import ConfigError, RunError
from ...common.storage import AnyPath
from ...strategies import Strategy
from ...strategies.devices.moves import move_module
from ...strategies.distributed.nested import map_tensors
from ...strategies.module.compiled_calls import compile_calls
from ...strategies.torch_internals.modules import find_uncompiled
from ...trainer.checkpoint.weights import load_weights
from ...trainer.data.seed import seed_everything as seed_all
from ...trainer.engine.engine import Engine
from ...trainer.module.all_gather import all_gather
from ...trainer.module.train_module import TrainModule
from ..checkpoint_files import is_own_path, read_torch_file
from ..extras.plugins import settings_of
from ..in_fabric import InFabric
from ..parts import Accelerator, accelerator_for
from .building import EmptyInit
from .files import load_file

T = TypeVar("T")

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")


class Fabric(Engine):
    """An `Engine` with the arguments of Lightning's Fabric.

    Modules stay the objects that they were, also in what `setup` returns. A loop that accumulates divides its loss, as
    with Lightning. Checkpoints are single files, since libraries open them with ``torch.load``. Methods are collective
    where the engine's are; what an engine cannot do is refused when it is asked for.

    Args:
        accelerator: ``auto``, ``cpu``, ``gpu``, or a type of device that torch has, as for the Trainer.
        strategy: a strategy or its name, as for `Engine`.
        devices: as for `Engine`.
        num_nodes: the number of machines.
        precision: as for the Trainer; by default ``32-true``.
        plugins: launchers and precisions, taken as what they stand for.
        callbacks: objects whose methods `call` calls.
        loggers: a logger, or several.

    Raises:
        ConfigError: for invalid arguments.
    """

    saves_single_files = True

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Logger | Sequence[Logger] | None = None,
    ) -> None:
        taken = settings_of(_as_list(plugins), {} if precision is None else {"precision": precision})
        name = accelerator if isinstance(accelerator, str) else accelerator.name()
        super().__init__(
            accelerator=name,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=taken.get("precision", precision) or "32-true",
        )
        self._callbacks, self._loggers = _as_list(callbacks), _as_list(loggers)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        run = vars(cls).get("run")
        if run is not None and not hasattr(run, "__wrapped__"):
            cls.run = _wrap_run(run)  # type: ignore[method-assign]

    # --- processes ---------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing; override it with a loop, which a call then runs in each process."""

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device."""
        return accelerator_for(self.device.type)

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            ConfigError: without any.
        """
        if not self._loggers:
            raise ConfigError("fabric.logger needs a logger, got Fabric(loggers=None); pass one.")
        return self._loggers[0]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201 - what the user asks for

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here; the name has no effect."""
        super().barrier()

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0, of each node if `local`, and then on the others. Collective."""
        rank = self.local_rank if local else self.global_rank
        if rank:
            self.barrier()
        try:
            yield
        finally:
            if not rank:
                self.barrier()

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed all generators of this process; the workers of loaders are always seeded."""
        return seed_all(seed, verbose=verbose)

    # --- setup -------------------------------------------------------------------------------------------------------

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True, **_: Any
    ) -> Any:
        """Set up a module with its optimizers; return them, followed by the scheduler if there is one.

        A module in ``torch.compile`` is compiled in place.

        Raises:
            ConfigError: with ``move_to_device=False``, and as in `Engine.setup`.
        """
        if not move_to_device:
            raise ConfigError(
                "setup needs move_to_device=True, got False: the strategy decides where parameters are; build the "
                "module in fabric.init_module() to create them there."
            )
        inner = find_uncompiled(module)
        if isinstance(inner, nn.Module):
            compile_calls(inner, module.dynamo_ctx)  # type: ignore[arg-type]
            module = inner
        kind = type(module)
        prepared = super().setup(module, *optimizers)
        for name in _STEPS:
            if getattr(kind, name, None) not in (None, getattr(TrainModule, name, None)):
                module.mark_forward_method(name)  # type: ignore[operator]
        if isinstance(module, InFabric):
            module.set_up_in(self, prepared[1:] if isinstance(prepared, tuple) else ())
        if isinstance(module, TrainModule) and module not in self._callbacks:
            self._callbacks.append(module)
        self.call("on_after_setup", fabric=self, module=module)
        return prepared if scheduler is None else (*prepared, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, **_: Any) -> Any:
        """Set up a module without optimizers."""
        return self.setup(module, move_to_device=move_to_device)

    def setup_dataloaders(  # type: ignore[override]
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Return one loader, or a list of them, as `Engine.setup_dataloaders` does."""
        prepared = super().setup_dataloaders(
            *dataloaders, use_distributed_sampler=use_distributed_sampler, move_to_device=move_to_device
        )
        return list(prepared) if isinstance(prepared, tuple) else prepared

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[object]:
        """Return the context in which to build a module.

        With `empty_init`, what ``torch.nn.init`` does is left out: load or initialize the parameters afterwards.
        """
        stack = ExitStack()
        stack.enter_context(super().init_module())
        stack.enter_context(EmptyInit(enabled=bool(empty_init)))
        return stack

    sharded_model = init_module

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Create tensors on the device, and with ``-true`` precisions in their dtype, inside the block."""
        before, dtype = torch.get_default_dtype(), self._precision.param_dtype
        with ExitStack() as stack:
            stack.enter_context(torch.device(self.device))
            if dtype is not None:
                torch.set_default_dtype(dtype)
                stack.callback(torch.set_default_dtype, before)
            yield

    # --- the step ----------------------------------------------------------------------------------------------------

    def backward(  # type: ignore[override]
        self, tensor: Any, *args: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Compute gradients as `Engine.backward` does; `model` is not needed."""
        super().backward(tensor, *args, **kwargs)

    def clip_gradients(  # type: ignore[override]
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer by norm, and return the norm before, or by value.

        Raises:
            ConfigError: for another norm than 2, and unless one limit is given.
            RunError: if the norm is not finite and `error_if_nonfinite` is True.
        """
        if max_norm is not None and norm_type != 2.0:
            raise ConfigError(
                f"clip_gradients needs norm_type=2.0, got {norm_type}: strategies compute this norm of shards; leave "
                "it out, or use clip_val."
            )
        norm = super().clip_gradients(optimizer, max_norm=max_norm, clip_val=clip_val)
        if norm is not None and error_if_nonfinite and not torch.isfinite(norm):
            raise RunError(
                f"The norm of the gradients is {norm.item()}; lower the learning rate, or pass error_if_nonfinite="
                "False to clip them anyway."
            )
        return norm

    # --- values of all ranks -----------------------------------------------------------------------------------------

    def to_device(self, obj: T) -> T:
        """Return tensors on the device of this process; a module is moved itself."""
        self._connect()
        if isinstance(obj, nn.Module):
            move_module(obj, self.device)
            return obj
        return super().to_device(obj)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors and numbers over the ranks in a new first dimension; on one rank they stay as they are."""
        self._connect()
        return all_gather(data, self.strategy, group, sync_grads=sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:  # type: ignore[override]
        """Reduce tensors in place, and numbers, over all ranks.

        Raises:
            ConfigError: for a group.
        """
        if group is not None:
            raise ConfigError(f"all_reduce needs group=None, got {group!r:.60}; call torch.distributed with it.")
        data = map_tensors(lambda tensor: tensor, data, self._as_tensor)
        reduced = super().all_reduce(data, str(reduce_op or "mean").rpartition(".")[2].lower())
        with torch.no_grad():
            for tensor, result in zip(_list_tensors(data), _list_tensors(reduced), strict=True):
                if tensor.dtype == result.dtype:
                    tensor.copy_(result)
        return reduced

    def _as_tensor(self, leaf: object) -> object:
        return torch.tensor(leaf, device=self.device) if isinstance(leaf, int | float) else leaf

    # --- files -------------------------------------------------------------------------------------------------------

    def _lose_batch(self, path: str | AnyPath) -> None:
        """Warn where an `Engine` refuses: Lightning saves also after a loop that was left with a batch read."""
        warnings.warn(
            f"fabric.save({str(path)!r}) was called with a batch read that no optimizer step has used; a run that "
            "resumes from it skips that batch. Save before the loop reads the next batch.",
            stacklevel=4,
        )

    def load(
        self,
        path: str | AnyPath,
        state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore objects as `Engine.load` does, also from a file that Lightning's Fabric has saved.

        Of such a file, tensors and plain values are read; `weights_only` changes nothing.
        """
        if is_own_path(path):
            return super().load(path, state, strict=strict)
        self._connect()
        return load_file(path, state, self._owner, strict=strict)

    def load_raw(self, path: str | AnyPath, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Load a module or an optimizer from a file that ``torch.save`` has written of its state, or a checkpoint."""
        self._connect()
        saved = load_weights(path) if is_own_path(path) else read_torch_file(path)
        load_file(path, {"state": obj}, self._owner, strict=strict, content={"state": saved})

    # --- callbacks and loggers ---------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with those of the keyword arguments that it takes."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                raise ConfigError(
                    f"fabric.call({hook_name!r}) found {method!r:.60} in {type(callback).__name__}; make it a method."
                )
            method(*args, **_taken_by(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values on rank 0."""
        if not self.is_global_zero:
            return
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics=values, step=step)


def _wrap_run(run: Callable[..., object]) -> Callable[..., Any]:
    """Return a ``run`` that starts the processes, unless it is called in one of them."""

    @wraps(run)
    def launch_and_run(self: Fabric, *args: object, **kwargs: object) -> Any:
        if self._is_connected:
            return run(self, *args, **kwargs)
        return self.launch(_run_fabric, *args, **kwargs)

    return launch_and_run


def _run_fabric(fabric: Fabric, *args: object, **kwargs: object) -> object:
    return fabric.run(*args, **kwargs)


def _taken_by(method: Callable[..., object], given: Mapping[str, object]) -> Mapping[str, object]:
    """Return those of the keyword arguments that a method takes."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return given
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _list_tensors(data: object) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, data)
    return found


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
