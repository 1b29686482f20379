"""Replica: each rank has the whole module, and the gradients of all replicas are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from ...common.errors import ConfigError, ModuleError
from ..distributed.collectives import Collectives
from ..state.sendable import is_sent
from ..torch_internals.distributed import ignore_in_ddp, is_reduced
from ..torch_internals.fake_tensors import is_without_memory
from ..wrapped.wrapped_tensors import held_tensors, is_wrapped
from .ddp_options import DDPOptions, register_compression
from .sharding_policy import sparse_layers
from .step_caller import SYNCHRONIZED, BeginSum, GradientSums, StepCaller, zero_loss_of
from .trained_set import TrainedSet


class Replica:
    """This rank's replica of a module.

    Its training step runs in ``DistributedDataParallel``. In manual optimization, gradients are averaged at the end of
    each backward instead. In a single process, nothing is wrapped. Collective: every rank makes one.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives | None,
        options: DDPOptions,
        *,
        is_manual: bool,
        ignored: Collection[str] = (),
    ) -> None:
        """Make all replicas equal to rank 0's; `collectives` is None in a single process.

        DDP leaves the parameters named in `ignored` alone.

        Raises:
            ConfigError: for options that do not work in manual optimization.
        """
        self.averages_gradients = True
        """Whether the gradients of a step are averaged over the ranks."""
        self._module, self._collectives, self._options = module, collectives, options
        self._ignored = frozenset(ignored)
        self._wrapper: Any = None
        self._averages_after_backward = self._is_fake = False
        self.syncs = True
        """Whether the next backward is the last of its step."""
        self._is_first_backward = True
        self._trained: TrainedSet | None = None
        self._is_inside_step = False
        """Whether gradients were accumulated that are not averaged yet."""
        self._sums: GradientSums | None = None
        self._is_outdated = False
        """Whether the module is to be wrapped anew although the same parameters train."""
        self._frozen_inside: list[nn.Parameter] = []
        """Parameters that were frozen after a micro-batch had accumulated gradients of them."""
        self._hooked: set[Tensor] = set()
        if collectives is None:
            return
        if options.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module)
        if is_manual:
            if options.comm_hook is not None:
                raise ConfigError(
                    f"comm_hook={options.comm_hook!r:.40} runs in DDP's backward, which manual optimization does not "
                    "use; leave it out."
                )
            self._averages_after_backward = True
            copy_from_first(chain(module.parameters(), module.buffers()), collectives)
        elif collectives.is_fake:
            self._is_fake = True  # torch's reducer, in C++, needs the addresses of tensors
        else:
            self._trained = TrainedSet(module, collectives, self._ignored)
            self._wrap(is_first=True)

    @property
    def _averaged(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are averaged, by name."""
        named = self._module.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad and name not in self._ignored}

    def _wrap(self, *, is_first: bool = False) -> None:
        """Wrap the module for the parameters that require a gradient. Collective: every rank calls it."""
        from torch.nn.parallel import DistributedDataParallel

        wrap: Any = DistributedDataParallel
        options = self._options
        if not self._averaged:  # DDP refuses to wrap nothing
            if is_first and self._collectives is not None:
                copy_from_first(chain(self._module.parameters(), self._module.buffers()), self._collectives)
            return
        returns_tensors = options.find_unused_parameters or options.static_graph
        self._caller = StepCaller(self._module, returns_tensors=returns_tensors, sums=self._sums)
        unsent = {name: t for name, t in self._named_tensors() if not is_sent(t) or _is_frozen_wrapper(t)}
        if unsent:
            self._send_as_bytes(unsent, is_first=is_first)
        if unsent or self._ignored:
            ignore_in_ddp(self._caller, [f"module.{name}" for name in self._ignored | unsent.keys()])
        # torch 2.14 deprecates broadcast_buffers for forward_sync_buffers, which 2.11 does not have
        is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        self._wrapper = wrap(
            self._caller,
            **{"forward_sync_buffers" if is_new else "broadcast_buffers": options.broadcast_buffers},
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            init_sync=is_first,
        )
        if options.comm_hook is not None:
            register_compression(self._wrapper, options.comm_hook)
        for _, layer in sparse_layers(self._module):
            if layer.weight.requires_grad and layer.weight not in self._hooked:
                self._hooked.add(layer.weight)
                layer.weight.register_hook(_with_values_of_its_own)

    def _named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        named = chain(self._module.named_parameters(), self._module.named_buffers())
        return ((name, tensor) for name, tensor in named if name not in self._ignored)

    def _send_as_bytes(self, tensors: Mapping[str, Tensor], *, is_first: bool) -> None:
        """Copy rank 0's values of tensors that torch cannot send: at first, and those of buffers when DDP does."""
        collectives = self._collectives
        assert collectives is not None
        if is_first:
            copy_from_first(tensors.values(), collectives)
        names = [name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)]

        def send(*_: object) -> None:
            if self._wrapper.require_forward_param_sync:
                copy_from_first([self._module.get_buffer(name) for name in names], collectives)

        if names and self._options.broadcast_buffers:
            self._caller.register_forward_pre_hook(send)

    def step_fn(self, step_name: str) -> Callable[..., object]:
        """Return a function that calls the module's step with as little overhead as possible."""
        if self._trained is None or step_name not in SYNCHRONIZED:
            return getattr(self._module, step_name)  # type: ignore[no-any-return]
        return partial(self._run, self._trained, step_name)

    def _run(self, trained: TrainedSet, step_name: str, *args: object) -> object:
        if self._is_outdated or trained.has_changed:
            self._wrap_anew(trained)
        if self._wrapper is None:
            return getattr(self._module, step_name)(*args)
        output = self._wrapper(step_name, *args)
        return self._caller.rebuild(output) if self._caller.returns_tensors else output

    def _wrap_anew(self, trained: TrainedSet) -> None:
        """Wrap the module for the parameters that require a gradient now. Collective: every rank calls it."""
        if self._is_inside_step:
            self._frozen_inside += [parameter for _, parameter in trained.changed(now=False)]
        trained.agree()
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:  # with its hooks, which would send gradients a second time
            del wrapper.logger, wrapper.reducer, wrapper
        self._wrap()
        self._is_first_backward, self._is_outdated = True, False
        self.set_grad_sync(self.syncs)

    def set_grad_sync(self, enabled: bool) -> None:
        """Set whether the next backward averages gradients; only a step's last micro-batch needs to."""
        self.syncs = enabled
        if self._wrapper is not None:
            # DDP learns a static graph in the first backward, which therefore has to synchronize; averaging the same
            # gradients a second time changes nothing
            learns = self._options.static_graph and self._is_first_backward
            is_due = (enabled and self.averages_gradients) or learns
            if self._wrapper.require_backward_grad_sync != is_due:  # setting an attribute of a module is slow
                self._wrapper.require_backward_grad_sync = is_due

    def sum_with_gradients(self) -> BeginSum | None:
        """Return what adds up numbers over all ranks, from the next step on with its gradients. Collective.

        None where DDP cannot: on devices, where gradients are compressed, or parameters may be unused.
        """
        options = self._options
        dtypes = [p.dtype for p in self._averaged.values() if p.is_cpu and p.dtype in (torch.float32, torch.float64)]
        is_plain = not (options.find_unused_parameters or options.static_graph or options.comm_hook)
        if self._wrapper is None or self._collectives is None or not (dtypes and is_plain):
            return None
        self._sums, self._is_outdated = GradientSums(dtypes[0], self._collectives.world_size), True
        return partial(self._begin_sum, self._collectives)

    def _begin_sum(self, collectives: Collectives, numbers: Sequence[float]) -> Callable[[], list[float]]:
        if self._sums is None or self._wrapper is None or not self._wrapper.require_backward_grad_sync:
            return collectives.begin_all_reduce(numbers, "sum")
        return self._sums.begin(numbers)

    def zero_loss(self) -> Tensor | None:
        """Return a loss of 0 whose backward joins the other ranks' step; None if the step must run for that."""
        if self._trained is not None and (self._is_outdated or self._trained.has_changed):
            self._wrap_anew(self._trained)
        if self._wrapper is None:
            return None
        trained = list(self._averaged.values())
        # those that the previous step used: with a gradient of 0, weight decay would change an unused parameter
        used = [parameter for parameter in trained if parameter.grad is not None]
        return zero_loss_of(self._wrapper, self._caller, used or trained)

    def end_backward(self) -> None:
        """Average gradients unless DDP did so during backward; then check that the backward reached them all.

        Raises:
            ModuleError: naming the parameters without a gradient, for which DDP would wait in the next step.
        """
        if self._averages_after_backward:
            if self.averages_gradients:
                assert self._collectives is not None
                average_gradients(self._module.parameters(), self._collectives)
            return
        synchronizes = self._wrapper is not None and self._wrapper.require_backward_grad_sync
        if synchronizes and self._sums is not None:
            self._sums.end_backward()
        if self._trained is not None:
            self._is_inside_step = not self.syncs
            if self.syncs and self.averages_gradients and (self._frozen_inside or self._trained.has_changed):
                self._average_rest(self._trained)
        if self._is_fake and self.syncs:
            synchronizes = True
            self._sum_in_place()
        # with several modules, this one may not have been part of the backward
        if self._is_first_backward and synchronizes and any(p.grad is not None for p in self._module.parameters()):
            self._is_first_backward = False
            self._check_all_used()
        elif synchronizes and self._wrapper is not None and not is_reduced(self._wrapper):
            self._check_all_used()

    def _average_rest(self, trained: TrainedSet) -> None:
        """Average the gradients of parameters that were frozen or unfrozen since the module was wrapped. Collective.

        Raises:
            ModuleError: if DDP still waits for the gradient of one.
        """
        assert self._collectives is not None
        gone = [name for name, _ in trained.changed(now=False)]
        if gone and not self._options.find_unused_parameters:
            raise ModuleError(
                f"{', '.join(gone[:8])} was frozen inside training_step, where DDP already waits for its gradient; "
                "call requires_grad_(False) before the step, such as in on_train_batch_start."
            )
        new = [parameter for _, parameter in trained.changed(now=True)]
        if new:
            trained.agree(takes_over=False)  # they are wrapped before the next step
        rest, self._frozen_inside = [*self._frozen_inside, *new], []
        average_gradients(rest, self._collectives, with_frozen=True)

    def _sum_in_place(self) -> None:
        """In a rehearsal, send what DDP would, without its buckets."""
        import torch.distributed as dist

        assert self._collectives is not None
        for parameter in self._averaged.values():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._collectives.device_group)

    def _check_all_used(self) -> None:
        if self._options.find_unused_parameters or self._options.static_graph:
            return
        unused = [name for name, parameter in self._averaged.items() if parameter.grad is None]
        if unused:
            raise ModuleError(
                f"{len(unused)} parameter(s) got no gradient in training_step, and DDP waits for the gradient of each: "
                f"{', '.join(unused[:8])}{', ...' if len(unused) > 8 else ''}. Use them in the loss, freeze them "
                "(requires_grad_(False)), or set find_unused_parameters=True of the strategy."
            )

    def sync_replicas(self) -> None:
        """Copy rank 0's buffers to all replicas. Collective: every rank calls it."""
        if self._collectives is not None and self._options.broadcast_buffers:
            copy_from_first(self._module.buffers(), self._collectives)


@unserializable_hook  # type: ignore[untyped-decorator]
def _with_values_of_its_own(gradient: Tensor) -> Tensor:
    """Copy a sparse gradient: its values may be shared with others, and DDP (torch 2.14) divides them in place."""
    return gradient.clone() if gradient.is_sparse else gradient


def _is_frozen_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is quantized or the like, and has no gradient: DDP would send numbers and quantize."""
    return not tensor.requires_grad and is_wrapped(tensor)


def copy_from_first(tensors: Iterable[Tensor], collectives: Collectives) -> None:
    """Copy the values that these tensors have on rank 0 to all ranks. Collective: every rank calls it.

    Of those that keep their elements in others, these are copied: sent as numbers, they would be quantized anew.
    """
    own = list(tensors)
    held = [inner for tensor in own for inner in held_tensors(tensor)]
    is_plain = len(held) == len(own)  # inner tensors may be laid out in any way
    with torch.no_grad():
        sent = [tensor.detach() if is_plain else tensor.detach().contiguous() for tensor in held]
        for tensor, first in zip(held, collectives.broadcast(sent), strict=True):
            tensor.copy_(first)


def average_gradients(
    parameters: Iterable[nn.Parameter], collectives: Collectives, *, with_frozen: bool = False
) -> None:
    """Replace each gradient by its mean over ranks, with one collective per dtype. Collective: every rank calls it.

    A missing gradient counts as 0 if another rank has one; if none has, it stays None. Several backwards in a row add
    up correctly: gradients that are averaged already are equal on all ranks, and averaging does not change them.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad or with_frozen:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for group in by_dtype.values():
        _average_gradients(group, collectives)


def _average_gradients(parameters: list[nn.Parameter], collectives: Collectives) -> None:
    """Average gradients of one dtype; flags that say which parameters have one are appended to the same tensor."""
    like = parameters[0]
    if not like.is_cpu:
        _average_on_device(parameters, collectives)
        return
    own = [float(p.grad is not None) for p in parameters]
    has_gradient = torch.tensor(own, dtype=like.dtype, device=like.device)
    gradients = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flat = collectives.all_reduce(torch.cat([*gradients, has_gradient]), "mean")
    averaged = flat[: -len(parameters)].split([p.numel() for p in parameters])
    # in a rehearsal the other ranks are as this one
    fractions = own if is_without_memory(flat) else flat[-len(parameters) :].tolist()
    for parameter, gradient, fraction in zip(parameters, averaged, fractions, strict=True):
        if not fraction:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient.view_as(parameter))


def _average_on_device(parameters: list[nn.Parameter], collectives: Collectives) -> None:
    """Average gradients on a device; gloo exchanges which parameters have one, so that nothing waits for the device."""
    counts = collectives.all_reduce(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)).tolist()
    used = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in used if parameter.grad is not None]
    for gradient, mean in zip(gradients, collectives.all_reduce(gradients, "mean"), strict=True):
        gradient.copy_(mean)
