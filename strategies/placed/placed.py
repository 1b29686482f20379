"""Placed: a module that lies on the ranks of a run, with what computes its steps, updates it and saves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.ranks import Ranks
from ..module.loss_scaling import LossScaling
from ..module.memory_estimate import MemoryShare
from ..module.precision import Precision
from ..state.dtensor import multiply_all, whole_on_cpu
from ..state.optimizer_state import load_by_name, state_by_name
from ..state.tied_names import as_tied, with_tied_names, without_unread
from .plain_copies import PlainCopies, release_tensors

if TYPE_CHECKING:
    from ..parallel.replica_check import ReplicaDifference

ClipAlgorithm = Literal["norm", "value"]


@dataclass(frozen=True)
class Site:
    """Where a strategy places modules: the ranks and the device of this process, and how they compute."""

    name: str
    """The strategy's name, for messages."""
    ranks: Ranks
    device: torch.device
    precision: Precision
    scaling: LossScaling
    """The loss scale, one for all modules of a run; disabled where the precision does not need one."""

    def alone(self, module: nn.Module) -> Placed:
        """Convert a whole module, move it to the device, and return it placed."""
        self.precision.convert_module(module, self.device)
        return Placed(self, module)


class Placed:
    """A module that lies on ranks, in the order in which a fit calls it. The loop never asks which kind it has.

    The defaults suit a whole module on one device. A subclass decides what its ranks communicate in a step, where
    gradients meet, and how state is collected.

    Args:
        site: where it lies.
        module: the user's module, as the strategy has converted, wrapped or sharded it.
    """

    def __init__(self, site: Site, module: nn.Module) -> None:
        self.module = module
        self._plain = PlainCopies()
        self._take_site(site)

    def _take_site(self, site: Site) -> None:
        """Take the ranks, device and loss scale of a run, which is not the first that has this module."""
        self.site, self.ranks, self.device = site, site.ranks, site.device
        self.precision, self.scaling = site.precision, site.scaling
        self.forward_context: AbstractContextManager[object] = site.precision.forward_context(site.device)
        """The context in which every step runs; it can be entered many times."""

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, which were built from the module's parameters; they may be changed in place."""

    def annotate(self, error: BaseException) -> None:
        """Add a note to an error raised in the user's code, if its cause is how the module lies on ranks."""

    def close(self) -> None:
        """Release what is held for the steps of a run; also called after a failed run."""

    @property
    def memory_share(self) -> MemoryShare:
        """The fraction of each parameter's memory that a rank holds."""
        return MemoryShare()

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        """Return a function that calls a step of the module as it lies here, with as little overhead as possible."""
        if self.precision.is_plain:
            return getattr(self.module, step_name)  # type: ignore[no-any-return]
        return partial(self._run, step_name)

    def _run(self, step_name: str, *args: Any) -> Any:
        """Call a step of the module in `forward_context`."""
        with self.forward_context:
            return getattr(self.module, step_name)(*args)

    def set_grad_sync(self, enabled: bool) -> None:
        """Set whether the next backward synchronizes gradients; only a step's last micro-batch needs to."""

    def beside_idle(self, step_name: str, busy: Sequence[bool], lent: Any) -> AbstractContextManager[None]:
        """Return the context of a step while data ranks that are not `busy` stand by, or run it with what is lent."""
        return nullcontext()

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        """Take part in a step without samples; `run` runs it with what a `busy` data rank lends. Collective."""
        run(None)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; the arguments are those of ``Tensor.backward``."""
        scaled = self.scaling.scale(loss) if self.precision.uses_scaler else loss
        scaled.backward(*args, **kwargs)

    def end_backward(self) -> None:
        """Finish a backward that `backward` did not compute, where several modules share one."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the loss scaling of an optimizer's gradients; a second call before its step does nothing."""
        if self.precision.uses_scaler:
            self.scaling.unscale(optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply all gradients by a factor, for a step whose weight is known only after its last micro-batch."""
        multiply_all([parameter.grad for parameter in self.module.parameters() if parameter.grad is not None], factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        """Clip the (unscaled) gradients of `optimizer`, by global norm, which is returned, or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, limit)
        return nn.utils.clip_grad_value_(parameters, limit)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> object:
        """Step the optimizer unless its gradients overflowed; return the loss of a closure that it evaluates itself."""
        if not self.precision.uses_scaler:
            return optimizer.step(closure)
        self.scaling.step(optimizer)
        return None

    def end_step(self) -> bool:
        """Update the loss scale after all optimizers have stepped; return False if an update was skipped."""
        return not self.precision.uses_scaler or self.scaling.end_step()

    def step_metrics(self) -> Mapping[str, float]:
        """Return measurements of the steps so far, for the loggers of rank 0."""
        return {}

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        """Make replicas equal, before an evaluation or a checkpoint; return what still differs. Collective."""

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        """Make these copies of the module's buffers, by name, equal on all ranks. Collective: every rank calls it."""
        if self.ranks.loss.world_size > 1:
            from ..parallel.replica import copy_from_first

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

    @contextmanager
    def gathered(self, part: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield a plain copy of a part with whole weights; see `PlacedMethods.gathered`. Collective."""
        part = self.module if part is None else part
        copied = self._plain.copy_of(part, self._whole_of(part))
        try:
            with torch.no_grad(), self.precision.forward_context(self.device):
                yield copied
        finally:
            release_tensors(copied.modules())

    def _whole_of(self, part: nn.Module) -> dict[Tensor, Tensor]:
        """Return whole tensors for the parameters of a part, or these, and copies of its buffers. Collective."""
        return {p: p for p in part.parameters()} | {b: b.detach().clone() for b in part.buffers()}

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state dict with the plain module's names, one or more of tied weights. Collective: all ranks."""
        self.module.load_state_dict(with_tied_names(self.module, without_unread(self.module, state)), strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, with parameters by name. Collective: every rank calls it."""
        return state_by_name(optimizer, self.module)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what any strategy's `optimizer_state` returned. Collective: every rank calls it."""
        load_by_name(optimizer, self.module, state)

    def _is_first_of_node(self) -> bool:
        return self.ranks.environment.local_rank == 0
