"""EngineProcesses: the processes of an engine, their ranks, and their communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ...common.console import outlives_output_errors
from ...common.errors import ConfigError, RunError
from ...common.other_trainers import OF_OTHER_ENGINES
from ...strategies import Precision, Strategy, place
from ...strategies.launch.peer_failures import blame_peer
from ..data.seed import capture_rng, restore_rng
from ..data.seed import seed_everything as seed_all
from .reported import concatenate_ranks, mean_by_samples, total_of
from .step_gradients import StepGradients

T = TypeVar("T")


class EngineProcesses:
    """The processes of an `Engine`; its arguments are the engine's."""

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
    ) -> None:
        self._precision = Precision(precision)
        self.strategy, self._hardware = place(strategy, accelerator, devices, num_nodes)
        self.strategy.validate(self._hardware, self._precision)
        stages, sequences = (self.strategy.mesh_axes.get(axis, 1) for axis in ("pp", "cp"))
        if self.strategy.needs_trainer or stages > 1 or sequences > 1:
            is_named = self.strategy.needs_trainer or stages > 1
            what = f"strategy={self.strategy.name!r}" if is_named else "context parallelism"
            raise ConfigError(
                f"{what} needs the Trainer's loop, which an Engine does not have; use echelon.Trainer, or another "
                "strategy, such as 'ddp', 'zero' or 'fsdp'."
            )
        self._gradients = StepGradients(self.strategy)
        self._is_connected = self._is_rank = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an `AttributeError` that says what to use instead of what Fabric or an Accelerator has."""
            remedy = OF_OTHER_ENGINES.get(name)
            hint = f"; use {remedy}" if remedy is not None else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    # --- processes ---------------------------------------------------------------------------------------------------

    @overload
    def launch(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> T: ...
    @overload
    def launch(self, function: None = None, /) -> None: ...
    def launch(self, function: Callable[..., T] | None = None, /, *args: object, **kwargs: object) -> T | None:
        """Start the processes, run ``function(engine, *args, **kwargs)`` in each, and return rank 0's result.

        Under a launcher such as torchrun, and with one process, it runs in this process; then `function` may be left
        out, and the loop follows the call. Changes that the function makes to the caller's objects stay in the
        processes: return what you need.

        Raises:
            ConfigError: without a function if processes have to be started, or for one that cannot be called so.

        Example::

            def main(engine, width):
                net = engine.setup(nn.Linear(4, width))
                return engine.reduce(engine.global_rank, "sum")

            Engine(accelerator="cpu", devices=1).launch(main, width=8)
        """
        if self._is_connected and self.strategy.launcher.starts_processes:
            raise RunError(
                f"engine.launch was called on rank {self.global_rank} of the processes that it has started; call it "
                "once, in the main program."
            )
        _check_takes_engine(function, args, kwargs)
        if not self.strategy.launcher.starts_processes:
            self._connect()
            return None if function is None else self._call(function, args, kwargs)
        if not callable(function):
            number = self.strategy.ranks.environment.world_size
            raise ConfigError(
                f"engine.launch must get a function where strategy={self.strategy.name!r} starts {number} processes, "
                f"got {function!r:.80}; write engine.launch(main) with a main(engine), or start the program "
                "with torchrun."
            )
        job = partial(self._run_as_rank, function, args, kwargs, capture_rng())
        return self.strategy.launcher.launch(job, parts={"function": function, "args": args, "kwargs": kwargs})

    def _run_as_rank(
        self,
        function: Callable[..., T],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        rng: Mapping[str, object],
    ) -> T:
        """Run a function in a process that was started for it, with the caller's random state."""
        restore_rng(rng)
        self._is_rank = True
        self._connect()
        return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object]) -> T:
        try:
            return function(self, *args, **kwargs)
        except BaseException as error:
            self.strategy.annotate(error)
            # in launched processes, the caller finds the culprit
            culprit = None if self._is_rank else blame_peer(self.strategy.ranks.group, error)
            if culprit is not None:
                raise culprit from error
            raise

    def _connect(self) -> None:
        """Connect to the other processes, once."""
        if self._is_connected:
            return
        if self.strategy.launcher.starts_processes and not self._is_rank:
            number = self.strategy.ranks.environment.world_size
            raise RunError(
                f"The engine has not started its {number} processes; put the loop into a "
                "function main(engine), and call engine.launch(main)."
            )
        self.strategy.connect(self._hardware, self._precision)
        self._is_connected = True

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.strategy.device

    @property
    def global_rank(self) -> int:
        """The rank of this process among all."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.strategy.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.strategy.is_global_zero

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            with outlives_output_errors() if kwargs.get("file") is None else nullcontext():
                print(*args, **kwargs)  # noqa: T201 - what the user asks for

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._connect()
        self.strategy.barrier()

    def seed_everything(self, seed: int | None = None) -> int:
        """Seed all generators of this process; call it before `setup`, after which each rank draws its own numbers."""
        return seed_all(seed, verbose=False)

    # --- values of all ranks -----------------------------------------------------------------------------------------

    def reduce(self, data: object, reduction: str = "mean") -> Any:
        """Return numbers and tensors reduced over all ranks, without gradient.

        ``mean`` weighs each rank by the samples of the batch it read last, and a `Loss` by its count; ``sum`` adds. A
        stand-in batch does not count.
        """
        self._connect()
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}; use all_reduce for others.")
        function = mean_by_samples if reduction == "mean" else total_of
        return function(data, self._gradients.size, self.strategy.ranks.data)

    def gather_for_metrics(self, data: object) -> Any:
        """Return tensors with one row per sample of the batch, gathered from all ranks in order, each sample once."""
        self._connect()
        return concatenate_ranks(data, self._gradients.size, self.strategy)

    def all_reduce(self, data: object, reduce_op: Any = "mean") -> Any:
        """Reduce every tensor and number over all ranks, each with the same weight."""
        self._connect()
        return self.strategy.reduce(data, reduce_op)

    def all_gather(self, data: object) -> Any:
        """Stack every tensor over the ranks, along a new first dimension."""
        self._connect()
        return self.strategy.all_gather(data)

    def broadcast(self, data: object, src: int = 0) -> Any:
        """Return rank `src`'s data, of any kind, on every rank."""
        self._connect()
        return self.strategy.broadcast(data, src)

    def to_device(self, data: T) -> T:
        """Return tensors, or modules, on the device of this process."""
        self._connect()
        return self.strategy.batch_to_device(data)


def _check_takes_engine(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Check that a function can be called with the engine and these arguments.

    Raises:
        ConfigError: if it cannot.
    """
    try:
        signature = inspect.signature(function) if callable(function) else None
    except ValueError:  # a function of C has none
        return
    if signature is None:
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"engine.launch calls {name}(engine, *args, **kwargs) with {len(args)} args and {len(kwargs)} kwargs, but "
            f"it takes {signature} ({error}); define {name}(engine, ...)."
        ) from None
