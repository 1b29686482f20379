"""AveragedWeights: averages of a module's tensors, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ...common.errors import CheckpointError
from ...strategies import Strategy
from ...strategies.distributed.nested import can_copy_later
from ...strategies.state.dtensor import is_wrapper, local_shard, shard_like, with_local_shard
from ...strategies.state.optimizer_state import Elsewhere
from ...strategies.torch_internals.tensors import move_together

AverageOne = Callable[[Tensor, Tensor, Tensor | int], Tensor]
AverageMany = Callable[..., None]


class ExponentialAverage:
    """Moves averages toward weights by a fixed fraction, regardless of how many were averaged before."""

    def __init__(self, decay: float) -> None:
        self._fraction = 1 - decay

    @torch.no_grad()
    def __call__(self, averages: list[Tensor], weights: list[Tensor], count: object = None) -> None:
        """Update the averages in place."""
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, weight in zip(averages, weights, strict=True):
            group = groups.setdefault((average.device, average.dtype), ([], []))
            group[0].append(average)
            group[1].append(weight)
        for (device, dtype), (group_averages, group_weights) in groups.items():
            later = can_copy_later(device)
            moved = [weight.detach().to(device, dtype, non_blocking=later) for weight in group_weights]
            move_together(group_averages, moved, self._fraction)


class AveragedWeights:
    """torch's ``AveragedModel`` over a module's tensors, without a copy of the module or of its other attributes.

    It averages the parameters, and with `use_buffers` the floating-point buffers in the module's state; all other
    buffers are the module's, and so are frozen weights that wrap other tensors, such as quantized ones.
    """

    def __init__(
        self,
        module: nn.Module,
        use_buffers: bool,
        device: torch.device | str | None,
        avg_fn: AverageOne | None,
        multi_avg_fn: AverageMany | None,
    ) -> None:
        self._live = _Live(module, use_buffers)
        holder = _Holder(self._live)
        if device is not None:
            holder.move(device)
        # use_buffers=False: the holder's parameters are averaged, and its buffers are copied
        self._exponential = multi_avg_fn if isinstance(multi_avg_fn, ExponentialAverage) else None
        self._model = AveragedModel(holder, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn, use_buffers=False)
        self.count = 0
        """The number of updates that were averaged."""

    def update(self) -> None:
        """Add the module's current tensors to the average."""
        if self._exponential is not None and self.count:
            self._update_exponentially(self._exponential)
        else:
            self._model.update_parameters(self._live)
        self.count += 1

    @torch.no_grad()
    def _update_exponentially(self, move: ExponentialAverage) -> None:
        """Do as torch does, but without updating the count on the device each time, which would wait."""
        move(list(self._model.module.parameters()), list(self._live.parameters()))
        for average, current in zip(self._model.module.buffers(), self._live.buffers(), strict=True):
            average.copy_(current, non_blocking=can_copy_later(average.device))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the module's tensors, in place."""
        for average, current in zip(self._model.module.parameters(), self._live.parameters(), strict=True):
            before = current.clone()
            current.copy_(average)
            average.copy_(before)

    def sync_buffers(self, strategy: Strategy) -> None:
        """Make the averages of buffers equal; they differ, since each rank has its own batches. Collective."""
        parameters = list(self._model.module.parameters())
        buffers = zip(self._live.names, parameters, strict=True)
        strategy.placed.sync_buffers(dict(list(buffers)[self._live.num_parameters :]))

    def exchange_in(self, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Return a state of the module with the averages, and the tensors that they replace; nothing is copied.

        Entries that other ranks write are left as they are.
        """
        averages = dict(zip(self._live.names, self._model.module.parameters(), strict=True))
        replaced = {name: first for name, first in self._live.first_names().items() if name in state}
        own = {name: first for name, first in replaced.items() if not isinstance(state[name], Elsewhere)}
        return (
            {**state, **{name: self._live.whole(first, averages[first].detach()) for name, first in own.items()}},
            {name: state[name] for name in replaced},
        )

    @torch.no_grad()
    def load(self, state: Mapping[str, object], count: int) -> None:
        """Restore an average from a state of the module.

        Raises:
            CheckpointError: if the state lacks a tensor of the average.
        """
        missing = sorted(set(self._live.names) - set(state))
        if missing:
            raise CheckpointError(
                f"The saved average lacks {', '.join(missing[:5])}; resume with the module and use_buffers as they "
                "were, or without weight averaging."
            )
        for name, average in zip(self._live.names, self._model.module.parameters(), strict=True):
            average.copy_(local_shard(shard_like(state[name], self._live.parameters_of.get(name))))
        self._model.n_averaged.fill_(count)
        self.count = count


class _Live(nn.Module):
    """A view of a module for AveragedModel: its parameters are averaged, its buffers are only copied."""

    def __init__(self, module: nn.Module, use_buffers: bool) -> None:
        super().__init__()
        self._of = (module,)  # in a tuple, so that it is not a submodule
        self.parameters_of = {name: p for name, p in module.named_parameters() if not is_wrapper(p)}
        saved = module.state_dict().keys() if use_buffers else ()
        self._averaged: dict[str, tuple[nn.Module, str]] = {}
        self._copied: list[tuple[nn.Module, str]] = []
        # owners, not tensors: a module may replace a buffer
        for prefix, owner in module.named_modules():
            for key, buffer in owner.named_buffers(recurse=False):
                name = f"{prefix}.{key}" if prefix else key
                if name in saved and (buffer.is_floating_point() or buffer.is_complex()):
                    self._averaged[name] = (owner, key)
                else:
                    self._copied.append((owner, key))
        self.num_parameters = len(self.parameters_of)
        self.names = [*self.parameters_of, *self._averaged]
        """The names of the averaged tensors; for a tensor with several names, the first."""

    def first_names(self) -> dict[str, str]:
        """Return all names of the averaged tensors, each mapped to its tensor's first name."""
        first = {id(parameter): name for name, parameter in self.parameters_of.items()}
        named = self._of[0].named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in named if id(p) in first} | {name: name for name in self._averaged}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return a tensor of `parameters` as a shard of its parameter, or as it is."""
        like = self.parameters_of.get(name)
        return part if like is None else with_local_shard(like, part)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:  # type: ignore[override]  # a shard is not a Parameter
        """Yield the averaged tensors; for a sharded one, this rank's shard."""
        yield from (local_shard(parameter) for parameter in self.parameters_of.values())
        yield from (getattr(owner, key) for owner, key in self._averaged.values())

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the tensors that are only copied."""
        return (getattr(owner, key) for owner, key in self._copied)


class _Holder(nn.Module):
    """Copies of the tensors that `_Live` yields."""

    def __init__(self, live: _Live) -> None:
        super().__init__()
        self.averaged = nn.ParameterList(
            nn.Parameter(t.detach().clone(), requires_grad=False) for t in live.parameters()
        )
        for index, buffer in enumerate(live.buffers()):
            self.register_buffer(f"copied_{index}", buffer.detach().clone())

    def move(self, device: torch.device | str) -> None:
        """Move the tensors; those of other pipeline ranks stay without memory."""
        self._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
