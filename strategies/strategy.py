"""Strategy: the interface between the training loop and the processes, in the order in which a run calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, RunError, not_set_up
from .cluster.environment import Environment
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .distributed.nested import to_device
from .distributed.process_group import START_TIMEOUT, ProcessGroup, ProcessSettings, check_settings
from .distributed.rank_methods import RankMethods
from .distributed.ranks import Ranks
from .launch.run_launcher import RunLauncher
from .module.loss_scaling import LossScaling
from .module.memory_estimate import MemoryShare
from .module.precision import Precision
from .parallel.replica import copy_from_first
from .parallel.replica_check import ReplicaDifference
from .pipeline.timeline import WindowRecorder
from .pipeline.work import WindowWork
from .state.dtensor import multiply_all, whole_on_cpu
from .state.optimizer_state import load_by_name, state_by_name
from .state.tied_names import as_tied, with_tied_names

ClipAlgorithm = Literal["norm", "value"]


class Strategy(RankMethods, ABC):
    """Train one module in any number of processes.

    The loop calls it in the order of the methods below and never asks which one it is. A subclass decides where
    parameters live, when gradients meet, and how state is collected. The defaults suit whole parameters on each rank.
    """

    name: ClassVar[str]
    """Its name in ``Trainer(strategy=...)``."""

    uses_many_devices: ClassVar[bool] = False
    """Whether ``devices="auto"`` means all devices rather than one."""
    uses_processes: ClassVar[bool] = False
    """Whether each device gets a process of its own."""
    forward_is_collective: ClassVar[bool] = False
    """Whether ranks communicate in forward, so that ranks without samples must `stand_by` in all steps."""
    supports_inference_mode: ClassVar[bool] = True
    """Whether evaluation may run in torch's inference mode rather than under ``torch.no_grad``."""

    supports_restarts: bool = False
    """Whether `ElasticStrategy` can contain it and restart its workers, also in a different number."""

    needs_trainer: ClassVar[bool] = False
    """Whether it relies on the Trainer's loop for more than its methods say, so that `Engine` cannot use it."""

    can_try_steps: bool = True
    """Whether a step can be undone: all that it changes is in the module, optimizers, loss scale and generators."""

    steps_alone: ClassVar[bool] = False
    """Whether ranks step with their own gradients and meet later, so that nothing is exchanged for a step."""

    has_stages: bool = False
    """Whether the module is divided into stages, through which `run_window` runs a step; known after `validate`."""
    has_loss: bool = True
    """Whether this rank computes losses; earlier pipeline stages do not. Known after `setup_module`."""

    # Known after `validate`:
    hardware: Hardware
    """The devices that the run may use."""
    precision: Precision
    """The dtypes in which the module computes; until then, ``32-true``."""
    launcher: RunLauncher
    """What starts the processes, unless a program such as torchrun has."""
    ranks: Ranks
    """The ranks of this process, and what launched it: a single process until then, all of the run after `connect`."""

    # Known after `connect`:
    device: torch.device
    """Where this process computes; until then, the CPU."""
    scaler: torch.amp.GradScaler
    """The gradient scaler, disabled where `precision` does not need one."""
    forward_context: AbstractContextManager[object]
    """The context in which every step runs; it can be entered many times."""

    # Known after `setup_module`:
    module: nn.Module
    """The user's module."""

    def __init__(self, **settings: Unpack[ProcessSettings]) -> None:
        """Take the process settings; a strategy without processes of its own has none."""
        self._process_settings = settings
        self.precision, self.device = Precision(), torch.device("cpu")
        self.ranks = Ranks.of(detect_environment({}), None, self.device)
        self.launcher = RunLauncher(self.environment)

    def __getattr__(self, name: str) -> Any:
        """Raise an error which says that an attribute declared above is not known before a run."""
        raise not_set_up(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle; a strategy that has joined a process group has none.

        Raises:
            RunError: if it has joined one.
        """
        if self.ranks.group is not None:
            raise RunError(
                f"A strategy that has joined others, as rank {self.rank} of {self.world_size}, cannot be copied or "
                "pickled, nor can its trainer; copy it before its first run, or the module alone."
            )
        return dict(self.__dict__)

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        """Check that this strategy can run on this hardware; called in the user's process, before `launch`.

        Raises:
            ConfigError: if it cannot.
        """
        self.hardware, self.precision = hardware, precision
        environment = hardware.environment
        self.ranks = replace(self.ranks, environment=environment)
        self.launcher = self._make_launcher()
        has_several = environment.world_size > 1
        if self.uses_processes:
            check_settings(self._process_settings, hardware.device_type, is_needed=has_several, of=type(self))
        elif has_several:
            remedy = "start one process" if environment.is_external else "set devices=1 and num_nodes=1"
            raise ConfigError(
                f"strategy={self.name!r} runs in one process, but there are {environment.world_size} "
                f"({environment.describe()}); use a strategy for several, such as 'ddp', or {remedy}."
            )

    def _make_launcher(self) -> RunLauncher:
        start_timeout = self._process_settings.get("start_timeout", START_TIMEOUT)
        uses_cuda = self.hardware.device_type == "cuda"
        return RunLauncher(self.environment, uses_cuda=uses_cuda, start_timeout=start_timeout)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        """Raise a `ConfigError` if the module as built so far cannot run, or train, here; in the user's process."""

    def validate_micro_batches(self, number: int) -> None:
        """Raise a `ConfigError` if full steps cannot have this many micro-batches; in the user's process."""

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        """Take the device and join the process group. Collective: every rank calls it."""
        environment = detect_environment() if self.uses_processes else self.environment
        has_peers = self.uses_processes and environment.world_size > 1
        if not has_peers:
            environment = self.environment
        self.hardware, self.precision = hardware, precision
        self.device = hardware.device(environment.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # this thread's default for streams, events and NCCL
        group = ProcessGroup(environment, self.device, **self._process_settings) if has_peers else None
        if group is not None:
            group.join()
        self.ranks = Ranks.of(environment, group, self.device)
        self.scaler = precision.make_scaler(self.device)
        self._scaling = LossScaling(self.scaler, self.device)
        self.forward_context = precision.forward_context(self.device)

    def for_another_module(self) -> Self:
        """Return a strategy for one more module of the same run, in the same processes and with the same loss scale."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def role_of(self, rank: int) -> str:
        """Return what sets a rank apart, such as its pipeline stage, for messages; empty if all ranks are equal."""
        return ""

    def annotate(self, error: BaseException) -> None:
        """Add a note to an error raised in the user's code if this strategy knows its cause."""

    def close(self) -> None:
        """Release the module; also called after a failed run. The process group is kept for the next run."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices on which this process computes."""
        return (self.device,)

    @property
    def environment(self) -> Environment:
        """The ranks of this process, and what launched it; until `validate`, a single process."""
        return self.ranks.environment

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The degrees of parallelism above 1, by mesh axis, for checkpoint manifests."""
        return {"dp_replicate": self.world_size} if self.world_size > 1 else {}

    @property
    def memory_share(self) -> MemoryShare:
        """The fraction of each parameter's memory that a rank holds."""
        return MemoryShare()

    def positions(self, length: int) -> Tensor:
        """Return the positions of a step's `length` tokens in the whole sequence, of which they may be a part."""
        return torch.arange(length, device=self.device)

    def init_context(self) -> AbstractContextManager[object]:
        """Return the context in which ``configure_model`` runs, for a strategy that decides where layers are built."""
        return nullcontext()

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        """Move, convert, wrap or shard the module; the optimizers are built from the parameters that result.

        With `is_manual`, the step itself computes gradients and updates. Collective: every rank calls it.
        """
        self.precision.convert_module(module, self.device)
        self.module = module

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, which were built after `setup_module`; they may be changed in place."""

    @property
    def max_lead(self) -> int:
        """The number of steps by which one rank may be ahead of another."""
        return 0

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Move a batch to a device, by default this process's."""
        return to_device(batch, device or self.device)

    @abstractmethod
    def run(self, step_name: str, *args: Any) -> Any:
        """Call a step of the module through its wrapper, if any, in `forward_context`."""

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        """Return a function that calls one step as `run` does, with as little overhead as possible."""
        return partial(self.run, step_name)

    def run_window(self, work: WindowWork) -> None:
        """Compute and add up the gradients of a step's micro-batches. Collective: every rank calls it."""
        raise not_set_up(self, "run_window")

    def record_window(self) -> WindowRecorder:
        """Record the next `run_window`, on every rank; for a strategy with stages, after `setup_module`."""
        raise not_set_up(self, "record_window")

    def set_grad_sync(self, enabled: bool) -> None:
        """Set whether the next backward synchronizes gradients; only a step's last micro-batch needs to."""

    def beside_idle(self, step_name: str, busy: Sequence[bool], lent: Any) -> AbstractContextManager[None]:
        """Return the context of a step while data ranks that are not `busy` stand by, or run it with what is lent."""
        return nullcontext()

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        """Take part in a step without samples; `run` runs it with what a `busy` data rank lends. Collective."""
        run(None)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled if the precision uses a gradient scaler."""
        return self.scaler.scale(loss) if self.precision.uses_scaler else loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; the arguments are those of ``Tensor.backward``."""
        self.scaled(loss).backward(*args, **kwargs)

    def end_backward(self) -> None:
        """Finish a backward that `backward` did not compute, where several modules share one."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of an optimizer's gradients; a second call before its step does nothing."""
        if self.precision.uses_scaler:
            self._scaling.unscale(optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by a factor, for a step whose weight is known only after its last micro-batch."""
        multiply_all([parameter.grad for parameter in self.module.parameters() if parameter.grad is not None], factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        """Clip the (unscaled) gradients of `optimizer`, by global norm, which is returned, or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, limit)
        return nn.utils.clip_grad_value_(parameters, limit)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step the optimizer unless its gradients overflowed."""
        if self.precision.uses_scaler:
            self._scaling.step(optimizer)
        else:
            optimizer.step(closure)

    def end_step(self) -> bool:
        """Update the loss scale after all optimizers have stepped; return False if an update was skipped."""
        return not self.precision.uses_scaler or self._scaling.end_step()

    def step_metrics(self) -> Mapping[str, float]:
        """Return this strategy's own measurements so far, for the loggers of rank 0."""
        return {}

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        """Make replicas equal, before an evaluation or a checkpoint; return what still differs. Collective."""

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        """Make these copies of the module's buffers, by name, equal on all ranks. Collective: every rank calls it."""
        copy_from_first(copies.values(), self.ranks.loss)

    def model_state(self) -> dict[str, Any]:
        """Return the module's state dict under the plain module's names. Collective: every rank calls it."""
        return self.module.state_dict()

    def full_model_state(self) -> dict[str, Any]:
        """Return the unsharded `model_state` on the CPU, at least on the first rank of each node. Collective."""
        return as_tied(self.module, {n: v.cpu() if isinstance(v, Tensor) else v for n, v in self.model_state().items()})

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        """Return unsharded copies of parameters, or of their gradients, on the CPU of every rank. Collective."""
        return whole_on_cpu({name: p.grad if gradients else p for name, p in named.items()})

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state dict with the plain module's names, one or more of tied weights. Collective: all ranks."""
        self.module.load_state_dict(with_tied_names(self.module, state), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, with parameters by name. Collective: every rank calls it."""
        return state_by_name(optimizer, self.module)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what any strategy's `optimizer_state` returned. Collective: every rank calls it."""
        load_by_name(optimizer, self.module, state)
