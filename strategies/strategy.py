"""Strategy: the seam between the loop and the processes, in the order in which a run meets it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .hardware import Hardware
from .nested import to_device
from .optimizer_state import state_by_name, state_by_position
from .precision import Precision

T = TypeVar("T")
ClipAlgorithm = Literal["norm", "value"]


class Strategy(ABC):
    """How one module is trained by some number of processes.

    The loop calls a strategy in the order of the methods below and never asks which one it is. A subclass is complete
    when it says where parameters live, when gradients meet, and how state is collected. What stands here is right for
    one process, and for every strategy whose parameters are whole on each rank.
    """

    name: ClassVar[str]
    """What ``Trainer(strategy=...)`` calls it."""

    uses_many_devices: ClassVar[bool] = False
    """Whether ``devices="auto"`` means all there are, or one."""

    # --- before any process is started -------------------------------------------------------------------------------

    def check(self, hardware: Hardware, precision: Precision) -> None:
        """Raise `ConfigError` if this strategy cannot run on that; called in the user's process, before `launch`."""

    def launch(self, function: Callable[[], T]) -> T:
        """Run `function` in every process and return what it returned on rank 0."""
        return function()

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        """Take the device and join the process group."""
        self.hardware = hardware
        self.precision = precision
        self.device = hardware.device(self.local_rank)
        self.scaler = precision.make_scaler(self.device)
        self._unscaled: set[Optimizer] = set()
        self.forward_context = precision.forward_context(self.device)

    def close(self) -> None:
        """Leave the process group; also called when the run failed."""

    @property
    def rank(self) -> int:
        """This process among all: 0 writes checkpoints and logs."""
        return 0

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1

    @property
    def data_rank(self) -> int:
        """Which share of every global batch this process reads."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many shares every global batch is cut."""
        return self.world_size

    def setup_module(self, module: nn.Module) -> None:
        """Move, convert, wrap or shard the module; its parameters have their final identity afterwards."""
        self.precision.convert_module(module)
        module.to(self.device)
        self.module = module

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, built over the final parameters; they may be changed in place."""

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """Move a batch to this process's device."""
        return to_device(batch, self.device)

    @property
    def is_transparent(self) -> bool:
        """Whether steps, backward and updates are torch's own, with nothing around them, to be called directly."""
        return False

    @abstractmethod
    def run(self, step_name: str, *args: Any) -> Any:
        """Call the module's step through whatever synchronises it, in the precision's context."""

    def accumulate(self, *, is_last: bool) -> None:
        """Note that a micro-batch begins, in a step that has several; only the last has to synchronise gradients."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss of which gradients are computed: scaled, if the precision scales."""
        return self.scaler.scale(loss) if self.precision.uses_scaler else loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; the arguments are those of ``Tensor.backward``."""
        if self.precision.uses_scaler:
            loss = self.scaler.scale(loss)
        loss.backward(*args, **kwargs)

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of the gradients of `optimizer`; a second call before its step does nothing."""
        if self.precision.uses_scaler and optimizer not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients, where the weight of a step was not known before its last micro-batch."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> None:
        """Clip the (unscaled) gradients of `optimizer` by their global norm, or each by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(parameters, limit)
        else:
            nn.utils.clip_grad_value_(parameters, limit)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters of `optimizer`, unless its gradients overflowed."""
        if self.precision.uses_scaler:
            self.scaler.step(optimizer)
        else:
            optimizer.step(closure)

    def end_step(self) -> bool:
        """Adapt the loss scale, once all optimizers of a step have stepped; return False if an update was skipped."""
        if not self.precision.uses_scaler:
            return True
        scale = self.scaler.get_scale()
        self.scaler.update()
        self._unscaled.clear()
        return self.scaler.get_scale() >= scale

    # --- state -------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """Return the module's state under the plain module's names. Collective: every rank calls it."""
        return self.module.state_dict()

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Put a state with the plain module's names into the module. Collective: every rank calls it."""
        self.module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with parameters by name. Collective: every rank calls it."""
        return state_by_name(optimizer, self.module)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` returned, of any strategy. Collective: every rank calls it."""
        optimizer.load_state_dict(state_by_position(optimizer, self.module, state))

    # --- collectives; identity on one process ------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: Literal["sum", "mean", "min", "max"] = "sum") -> Any:
        """Reduce every tensor of a nested structure over all ranks. Collective: every rank calls it."""
        return data

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data on every rank. Collective: every rank calls it."""
        return data

    def barrier(self) -> None:
        """Wait until every rank is here. Collective: every rank calls it."""
