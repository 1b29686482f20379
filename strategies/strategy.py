"""Strategy: the interface between the loop and the processes, in the order in which a run calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .cluster.environment import Environment
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .distributed.collectives import Collectives
from .distributed.data_rank_collectives import broadcast, of_data_ranks
from .distributed.nested import to_device
from .distributed.process_group import START_TIMEOUT, ProcessGroup, ProcessSettings, check_settings
from .distributed.rehearsed import collectives_of
from .distributed.tensor_collectives import ReduceOp
from .errors import ConfigError, ProcessError, RunError, not_set_up
from .estimate.estimate import Estimate, estimate_alone
from .estimate.profile import Profile
from .module.loss_scaling import LossScaling
from .module.memory_estimate import MemoryShare
from .module.precision import Precision
from .parallel.replica import copy_from_first
from .pipeline.timeline import WindowRecorder
from .pipeline.window import WindowWork
from .state.dtensor import multiply_all, whole_on_cpu
from .state.optimizer_state import state_by_name, state_by_position

T = TypeVar("T")
ClipAlgorithm = Literal["norm", "value"]


class Strategy(ABC):
    """Train one module in any number of processes.

    The loop calls a strategy in the order of the methods below and never asks which one it is. A subclass says where
    parameters are, when gradients are averaged, and how state is collected. The defaults are right for one process, and
    for every strategy that keeps whole parameters on each rank.
    """

    name: ClassVar[str]
    """Its name in ``Trainer(strategy=...)``."""

    uses_many_devices: ClassVar[bool] = False
    """Whether ``devices="auto"`` means all devices, or one."""
    uses_processes: ClassVar[bool] = False
    """Whether each device gets a process of its own."""
    forward_is_collective: ClassVar[bool] = False
    """Whether ranks communicate in forward, so that all ranks have to run a step whenever one does."""

    supports_inference_mode: ClassVar[bool] = True
    """Whether evaluation may run in torch's inference mode; otherwise it runs without gradients."""

    supports_restarts: bool = False
    """Whether its workers may be started again in another number, as `ElasticStrategy` does with those it contains."""

    needs_trainer: ClassVar[bool] = False
    """Whether it does more than its methods say in a loop that is not the Trainer's, so that `Engine` cannot use it."""

    can_try_steps: bool = True
    """Whether steps can be taken back: all that they change is in module, optimizers, loss scale and generators."""

    has_stages: bool = False
    """Whether the module is dealt to stages, through which `run_window` runs a step; known after `validate`."""
    has_loss: bool = True
    """Whether this rank computes losses, and is not one of the stages before; known after `setup_module`."""

    supervisor: Any = None
    """What watches the workers of a run that is started again after faults; None for all other runs."""
    starts_processes: bool = False
    """Whether `launch` starts processes, because no launcher has; known after `validate`."""

    # Known after `validate`:
    hardware: Hardware
    """The devices that the run may use."""
    precision: Precision
    """The dtypes in which the module computes; before, ``32-true``."""
    environment: Environment
    """The ranks of this process, and who started it; before, a single process."""

    # Known after `connect`:
    group: ProcessGroup | None
    """The joined processes; None for one process, and before."""
    device: torch.device
    """Where this process computes; before, the CPU."""
    collectives: Collectives
    """How this process communicates with the others; before, with none."""
    data_collectives: Collectives
    """Those of the data ranks: of each replica the rank with the same part as this one. By default `collectives`."""
    loss_collectives: Collectives
    """Those of the ranks whose losses make up the loss of a step: the data ranks, unless sequences are cut, too."""
    count_collectives: Collectives
    """Those of the same ranks, and of the stages before the loss, which have none. By default `loss_collectives`."""
    stage_collectives: Collectives
    """Those of the ranks of one pipeline, through whose stages `run_window` runs a step; by default this rank alone."""
    scaler: torch.amp.GradScaler
    """The gradient scaler, disabled where `precision` needs none."""
    forward_context: AbstractContextManager[object]
    """In which every step runs; entered many times."""

    # Known after `setup_module`:
    module: nn.Module
    """The user's module."""

    def __init__(self, **settings: Unpack[ProcessSettings]) -> None:
        """Take the settings of the processes; a strategy that uses none has none."""
        self._process_settings = settings
        self.environment = detect_environment({})
        self.precision = Precision()
        self.group, self.device = None, torch.device("cpu")
        self._use(Collectives(None, self.device))

    def _use(self, collectives: Collectives) -> None:
        """Take one kind of collectives for all purposes."""
        self.collectives = self.data_collectives = self.loss_collectives = self.count_collectives = collectives
        self.stage_collectives = Collectives(None, self.device)

    def __getattr__(self, name: str) -> Any:
        """Say of what is declared above, and not known yet, that it takes a run."""
        raise not_set_up(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied or pickled: nothing of a process that has joined others.

        Raises:
            RunError: in such a process.
        """
        if self.group is not None:
            raise RunError(
                f"A strategy that has joined others, as rank {self.rank} of {self.world_size}, cannot be copied or "
                "pickled, nor can its trainer; copy it before its first run, or the module alone."
            )
        return dict(self.__dict__)

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        """Check that this strategy can run on the hardware; called in the user's process before `launch`.

        Raises:
            ConfigError: if it cannot.
        """
        self.hardware, self.precision = hardware, precision
        self.environment = environment = hardware.environment
        has_several = environment.world_size > 1
        if self.uses_processes:
            check_settings(self._process_settings, hardware.device_type, is_needed=has_several)
            self.starts_processes = has_several and not environment.is_external
        elif has_several:
            remedy = "start one process" if environment.is_external else "set devices=1 and num_nodes=1"
            raise ConfigError(
                f"strategy={self.name!r} runs in one process, but there are {environment.world_size} "
                f"({environment.describe()}); use a strategy for several, such as 'ddp', or {remedy}."
            )

    def validate_module(self, module: nn.Module) -> None:
        """Raise a `ConfigError` if a module, as far as it is built, cannot be trained so; in the user's process."""

    @property
    def start_timeout(self) -> timedelta:
        """How long the processes wait for each other at the start."""
        return self._process_settings.get("start_timeout", START_TIMEOUT)

    def launch(
        self,
        function: Callable[[], T],
        *,
        on_result: Callable[[T], None] | None = None,
        parts: Mapping[str, object] | None = None,
    ) -> T:
        """Start the processes, run `function` in each, and return its result from the first process of this node.

        Args:
            function: is pickled and sent to the processes.
            on_result: gets the result before a signal that this process has received is raised in it.
            parts: the objects that `function` takes along, by the names that an error uses for them.
        """
        from .launch.launcher import launch, static_agents

        environment, uses_cuda = self.environment, self.hardware.device_type == "cuda"
        make_agent = static_agents(environment.local_world_size, environment, self.start_timeout)
        is_local = environment.num_nodes == 1
        return launch(function, make_agent, is_local=is_local, uses_cuda=uses_cuda, on_result=on_result, parts=parts)

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        """Take the device and join the process group. Collective: every rank calls it."""
        environment = detect_environment() if self.uses_processes else self.environment
        has_peers = self.uses_processes and environment.world_size > 1
        if has_peers:
            self.environment = environment
        self.hardware, self.precision = hardware, precision
        self.device = hardware.device(self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; streams, events and NCCL take it where none is named
        if has_peers:
            self.group = ProcessGroup(self.environment, self.device, **self._process_settings)
            self.group.join()
        self._use(collectives_of(self.group, self.device))
        self.scaler = precision.make_scaler(self.device)
        self._scaling = LossScaling(self.scaler)
        self.forward_context = precision.forward_context(self.device)

    def for_another_module(self) -> Self:
        """Return a strategy for one more module of the same run, in the same processes and with the same loss scale."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def blame_peer(self, error: BaseException) -> ProcessError | None:
        """Tell the other ranks of this rank's error; if another rank is at fault, return an error that names it."""
        from .launch.peer_failures import blame_peer

        return blame_peer(self.group, error) if self.group is not None else None

    def role_of(self, rank: int) -> str:
        """Return what a rank has that others have not, such as its stage, for messages; empty where all are alike."""
        return ""

    def annotate(self, error: BaseException) -> None:
        """Add a note to an error of the user's code whose cause this strategy knows."""

    def close(self) -> None:
        """Release the module; also called when the run failed. The process group stays for the next run."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices on which this process computes."""
        return (self.device,)

    @property
    def root_device(self) -> torch.device:
        """Lightning's name of `device`."""
        return self.device

    @property
    def rank(self) -> int:
        """The rank of this process among all; rank 0 writes checkpoints and logs."""
        return self.environment.rank

    global_rank = rank
    """Lightning's name of `rank`."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.environment.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.environment.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.group.world_size if self.group is not None else 1

    @property
    def data_rank(self) -> int:
        """Which slice of every global batch this process reads."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many slices every global batch is cut."""
        return self.world_size

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The degrees of parallelism above 1 by axis of the mesh, for the manifests of checkpoints."""
        return {"dp_replicate": self.world_size} if self.world_size > 1 else {}

    @property
    def memory_share(self) -> MemoryShare:
        """Which fraction of each parameter's memory a rank holds."""
        return MemoryShare()

    def estimate(self, profile: Profile, hardware: Hardware) -> Estimate:
        """Return what a rank would hold and send in a step on this hardware; a `ConfigError` says why it could not."""
        self.validate(hardware, profile.precision)
        self.validate_module(profile.module)
        return self._estimate(profile)

    def _estimate(self, profile: Profile) -> Estimate:
        """Return `estimate` once the hardware is known; by default that of one process, and none of several."""
        return estimate_alone(profile, self.name, self.environment.world_size)

    def positions(self, length: int) -> Tensor:
        """Return the positions of the `length` tokens of a step's sequences, which may be parts of longer ones."""
        return torch.arange(length, device=self.device)

    def init_context(self) -> AbstractContextManager[object]:
        """Return the context of ``configure_model``, for a strategy that decides where layers are built."""
        return nullcontext()

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        """Move, convert, wrap or shard the module; afterwards its parameters are those that the optimizers get.

        With `is_manual` the step itself computes gradients and updates. Collective: every rank calls it.
        """
        self.precision.convert_module(module)
        module.to(self.device)
        self.module = module

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the parameters that `setup_module` left; they may be changed in place."""

    @property
    def max_lead(self) -> int:
        """By how many steps a rank may be ahead of another."""
        return 0

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Move a batch to a device, by default this process's."""
        return to_device(batch, device or self.device)

    @abstractmethod
    def run(self, step_name: str, *args: Any) -> Any:
        """Call a step of the module through its wrapper, if any, in `forward_context`."""

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        """Return a function that calls one step as `run` does, with as few calls in between as possible."""
        return partial(self.run, step_name)

    def run_window(self, work: WindowWork) -> None:
        """Add the gradients of all micro-batches of a step. Collective: every rank calls it."""
        raise not_set_up(self, "run_window")

    def record_window(self) -> WindowRecorder:
        """Record the next `run_window`, on every rank; for a strategy with stages, after `setup_module`."""
        raise not_set_up(self, "record_window")

    def set_grad_sync(self, enabled: bool) -> None:
        """Say whether the next backward synchronizes gradients: that of a step's last micro-batch does."""

    def zero_loss(self, spare: Callable[[], Tensor]) -> Tensor:
        """Return a loss of 0 with which a rank without samples takes part in the backward of the other ranks.

        `spare` computes a loss from an earlier batch, for a strategy whose forward is collective.
        """
        return spare() * 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled if the precision scales losses."""
        return self.scaler.scale(loss) if self.precision.uses_scaler else loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; the arguments are those of ``Tensor.backward``."""
        self.scaled(loss).backward(*args, **kwargs)

    def end_backward(self) -> None:
        """Do what is due after a backward that was not computed by `backward`, where several modules share one."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of an optimizer's gradients; a second call before its step does nothing."""
        if self.precision.uses_scaler:
            self._scaling.unscale(optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients; for a step whose weight was not known before its last micro-batch."""
        multiply_all([parameter.grad for parameter in self.module.parameters() if parameter.grad is not None], factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        """Clip the (unscaled) gradients of `optimizer` by their global norm, which is returned, or each by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, limit)
        return nn.utils.clip_grad_value_(parameters, limit)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step the optimizer, unless its gradients overflowed."""
        if self.precision.uses_scaler:
            self._scaling.step(optimizer)
        else:
            optimizer.step(closure)

    def end_step(self) -> bool:
        """Update the loss scale after all optimizers have stepped; return False if an update was skipped."""
        return not self.precision.uses_scaler or self._scaling.end_step()

    def step_metrics(self) -> Mapping[str, float]:
        """Return what this strategy has measured until now, for the loggers of rank 0."""
        return {}

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self) -> None:
        """Make replicas equal before an evaluation or a checkpoint. Collective: every rank calls it."""

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        """Make copies of the module's buffers, by name, equal on all ranks. Collective: every rank calls it."""
        copy_from_first(copies.values(), self.loss_collectives)

    def model_state(self) -> dict[str, Any]:
        """Return the module's state under the plain module's names. Collective: every rank calls it."""
        return self.module.state_dict()

    def full_model_state(self) -> dict[str, Any]:
        """Return `model_state` whole, on the CPU, at least on each node's first rank: a caller gets it. Collective."""
        return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in self.model_state().items()}

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        """Return copies of parameters, or of the gradients of their update, whole, on every rank's CPU. Collective."""
        return whole_on_cpu({name: p.grad if gradients else p for name, p in named.items()})

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state with the plain module's names. Collective: every rank calls it."""
        self.module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with parameters by name. Collective: every rank calls it."""
        return state_by_name(optimizer, self.module)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` of any strategy returned. Collective: every rank calls it."""
        optimizer.load_state_dict(state_by_position(optimizer, self.module, state))

    # --- collectives of the data ranks, as `Collectives` documents them ----------------------------------------------

    all_reduce = of_data_ranks(Collectives.all_reduce)
    all_gather = of_data_ranks(Collectives.all_gather)
    reduce_scatter = of_data_ranks(Collectives.reduce_scatter)
    scatter = of_data_ranks(Collectives.scatter)
    gather = of_data_ranks(Collectives.gather)
    all_gather_object = of_data_ranks(Collectives.all_gather_object)
    send = of_data_ranks(Collectives.send)
    recv = of_data_ranks(Collectives.recv)
    isend = of_data_ranks(Collectives.isend)
    irecv = of_data_ranks(Collectives.irecv)
    broadcast = broadcast
    barrier = of_data_ranks(Collectives.barrier, "collectives")

    def reduce(self, data: Any, reduce_op: ReduceOp = "mean") -> Any:
        """Return `all_reduce` of data, by default the mean. Collective: every rank calls it."""
        return self.data_collectives.all_reduce(data, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or with ``all=False`` any, have decided so. Collective: every rank calls it."""
        return bool(self.collectives.all_reduce(int(decision), "min" if all else "max"))
