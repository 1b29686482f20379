"""Rehearsal: one rank of a run of any size, in this process, on tensors without memory and without the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import ConfigError
from ...strategies import Strategy
from ...strategies.cluster.environment import overriding_variables
from ...strategies.distributed.nested import map_tensors
from ...strategies.elastic import ForwardingStrategy, forward_members
from ...strategies.estimate.counted_traffic import CountedTraffic
from ...strategies.estimate.live_memory import LiveMemory
from ...strategies.experts.without_values import even_experts
from ...strategies.module.loss_scaling import LossScaling
from ...strategies.placed.placed import Placed
from ...strategies.torch_internals.fake_tensors import join_fake_group, make_fake_mode_beside_real
from .profiling import without_memory

if TYPE_CHECKING:
    from ...strategies.torch_internals.fake_tensors import FakeTensorMode


class RehearsedStrategy(ForwardingStrategy):
    """Do what another strategy does on one rank, with tensors that have a shape but no memory.

    Its collectives are those of torch's fake process group. What values decide is skipped: the scale of losses, and
    comparisons of ranks with each other.

    Args:
        inner: the strategy.
        mode: the mode in which the module was built without memory.
    """

    name: ClassVar[str] = "rehearsal"

    def __init__(self, inner: Strategy, mode: FakeTensorMode) -> None:
        super().__init__(inner)
        self.mode = mode
        self.doing = "validate"
        """The method of the strategy that was called last."""
        self.seconds: dict[str, float] = {}
        """The seconds that this process spent in each method."""
        self.memory: LiveMemory | None = None
        """What is alive besides the module; known after `place`."""
        self.traffic = CountedTraffic()
        """What this rank sends, counted while `counts_traffic` is set."""
        self.counts_traffic = self._is_inside = False
        self._module = nn.Module()

    @contextmanager
    def rehearsing(self, name: str) -> Iterator[None]:
        """Run a method of the inner strategy, or of what it has placed, and note that it is running."""
        if self._is_inside:
            yield
            return
        self._is_inside, self.doing = True, name
        began = time.perf_counter()
        with self.mode, even_experts(self._module), ExitStack() as stack:
            if self.memory is not None:
                stack.enter_context(self.memory.watching_resizes())
                stack.enter_context(self.memory)
            if self.counts_traffic:
                stack.enter_context(self.traffic)
            try:
                yield
            finally:
                self._is_inside = False
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def connect(self, hardware: Any, precision: Any) -> None:
        self.doing = "connect"
        self.inner.connect(hardware, precision)

    def init_context(self) -> AbstractContextManager[object]:
        return self.mode  # nothing is left for deferred_init to defer

    def place(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        without_memory(module, self.mode, self.precision.param_dtype)
        self._module = module
        # the module is already in its place; torch would swap tensors without memory for others, and cannot
        vars(module)["to"] = lambda *_, **__: module
        try:
            with self.rehearsing("place"):
                inner = self.inner.place(module, is_manual=is_manual)
        finally:
            del vars(module)["to"]
        self.memory = LiveMemory(module)
        self.placed = RehearsedPlaced(inner, self)
        return self.placed


class RehearsedPlaced(Placed):
    """What another placed module does, inside a rehearsal. The inner one has the members that are not below."""

    def __init__(self, inner: Placed, rehearsal: RehearsedStrategy) -> None:
        # no super().__init__(): the fields are the inner one's
        self.inner, self._rehearsal = inner, rehearsal
        self.scaling = LossScaling.disabled(inner.device)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner one that `Placed` sets when it is made."""
        return getattr(self.inner, name)

    def step_fn(self, step_name: str) -> Callable[..., object]:
        return partial(self._run, step_name)

    def _run(self, step_name: str, *args: object) -> object:
        batch, *rest = args
        with self._rehearsal.rehearsing(step_name):
            return self.inner.step_fn(step_name)(map_tensors(self._rehearsal.mode.from_tensor, batch), *rest)

    def unscale(self, optimizer: Optimizer) -> None:
        """Leave the gradients as they are: whether they overflow depends on values."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        with self._rehearsal.rehearsing("step"):
            optimizer.step(closure)

    def end_step(self) -> bool:
        return True

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        with self._rehearsal.rehearsing("backward"):
            self.inner.backward(loss, *args, **kwargs)


def _rehearse_method(name: str) -> Callable[..., object]:
    def method(self: RehearsedPlaced, *args: object, **kwargs: object) -> object:
        with self._rehearsal.rehearsing(name):
            return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    *("take_optimizers", "run_window", "record_window", "stand_by", "end_backward", "scale_gradients", "clip"),
    *("sync_replicas", "model_state", "optimizer_state"),
):
    setattr(RehearsedPlaced, _name, _rehearse_method(_name))
forward_members(RehearsedPlaced, Placed)


@contextmanager
def as_rank(rank: int, world_size: int, local_world_size: int) -> Iterator[FakeTensorMode]:
    """Make this process look like a rank of a run started by torchrun; yield the mode of its tensors.

    Raises:
        ConfigError: for a rank that does not exist, or in a process that has joined a process group.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"--rank must be from 0 to {world_size - 1}, got {rank}, because there are {world_size} ranks."
        )
    if dist.is_initialized():
        raise ConfigError(
            f"A rehearsal must run in its own process, got rank {dist.get_rank()} of {dist.get_world_size()}; run "
            "`echelon rehearse` outside a run."
        )
    variables: Mapping[str, int | str] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    with overriding_variables({name: str(value) for name, value in variables.items()}):
        join_fake_group(rank, world_size)
        try:
            yield make_fake_mode_beside_real()
        finally:
            dist.destroy_process_group()
