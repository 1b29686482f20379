"""AveragedWeights: the averaged counterparts of a module's tensors, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ...strategies import Strategy
from ...strategies.errors import CheckpointError
from ...strategies.state.dtensor import local_shard, shard_like, with_local_shard

AverageOne = Callable[[Tensor, Tensor, Tensor | int], Tensor]
AverageMany = Callable[..., None]


class AveragedWeights:
    """torch's ``AveragedModel`` over a module's tensors, without a copy of the module or of what it refers to.

    Averaged are the parameters, and with `use_buffers` the floating-point buffers that the module's state has; the
    other buffers are the module's own.
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
            holder.to(device)
        # buffers=False: what the holder calls parameters is averaged, and what it calls buffers is copied
        self._model = AveragedModel(holder, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn, use_buffers=False)
        self.count = 0
        """Of how many weights this is the average."""

    def update(self) -> None:
        """Take the module's current tensors in."""
        self._model.update_parameters(self._live)
        self.count += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the module's tensors, in place."""
        for average, current in zip(self._model.module.parameters(), self._live.parameters(), strict=True):
            before = current.clone()
            current.copy_(average)
            average.copy_(before)

    def sync_buffers(self, strategy: Strategy) -> None:
        """Take rank 0's average of the buffers, which may differ: each rank has seen its own batches. Collective."""
        parameters = list(self._model.module.parameters())
        buffers = parameters[self._live.num_parameters :]
        with torch.no_grad():
            for mine, first in zip(buffers, strategy.broadcast([b.detach() for b in buffers]), strict=True):
                mine.copy_(first)

    def exchange_in(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a state of the module with the average in it, and what was there instead; nothing is copied."""
        averages = dict(zip(self._live.names, self._model.module.parameters(), strict=True))
        mine = {name: first for name, first in self._live.first_names().items() if name in state}
        return (
            {**state, **{name: self._live.whole(first, averages[first].detach()) for name, first in mine.items()}},
            {name: state[name] for name in mine},
        )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], count: int) -> None:
        """Take an average back from a state of the module.

        Raises:
            CheckpointError: if the state has not all of its tensors.
        """
        missing = sorted(set(self._live.names) - set(state))
        if missing:
            raise CheckpointError(
                f"The saved average has no {', '.join(missing[:5])}; resume with the module and use_buffers as they "
                "were, or without weight averaging."
            )
        for name, average in zip(self._live.names, self._model.module.parameters(), strict=True):
            average.copy_(local_shard(shard_like(state[name], self._live.parameters_of.get(name))))
        self._model.n_averaged.fill_(count)
        self.count = count


class _Live(nn.Module):
    """A module seen as AveragedModel wants it: as parameters what is averaged, as buffers what is only copied."""

    def __init__(self, module: nn.Module, use_buffers: bool) -> None:
        super().__init__()
        self._of = (module,)  # in a tuple, so that it is no submodule
        self.parameters_of = dict(module.named_parameters())
        saved = module.state_dict().keys() if use_buffers else ()
        self._averaged: dict[str, tuple[nn.Module, str]] = {}
        self._copied: list[tuple[nn.Module, str]] = []
        # owners, not tensors: a module may put another tensor in a buffer's place
        for prefix, owner in module.named_modules():
            for key, buffer in owner.named_buffers(recurse=False):
                name = f"{prefix}.{key}" if prefix else key
                if name in saved and buffer.is_floating_point():
                    self._averaged[name] = (owner, key)
                else:
                    self._copied.append((owner, key))
        self.num_parameters = len(self.parameters_of)
        self.names = [*self.parameters_of, *self._averaged]
        """What is averaged; a tensor with several names under its first."""

    def first_names(self) -> dict[str, str]:
        """Return all names of what is averaged, each with the first name of its tensor."""
        first = {id(parameter): name for name, parameter in self.parameters_of.items()}
        named = self._of[0].named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in named} | {name: name for name in self._averaged}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return a part, as `parameters` yields them, as a tensor that knows of which whole."""
        like = self.parameters_of.get(name)
        return part if like is None else with_local_shard(like, part)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:  # type: ignore[override]  # parts are no Parameter
        """Yield what is averaged; of what is sharded, this rank's part."""
        yield from (local_shard(parameter) for parameter in self.parameters_of.values())
        yield from (getattr(owner, key) for owner, key in self._averaged.values())

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield what is copied."""
        return (getattr(owner, key) for owner, key in self._copied)


class _Holder(nn.Module):
    """Copies of what `_Live` yields."""

    def __init__(self, live: _Live) -> None:
        super().__init__()
        self.averaged = nn.ParameterList(
            nn.Parameter(t.detach().clone(), requires_grad=False) for t in live.parameters()
        )
        for index, buffer in enumerate(live.buffers()):
            self.register_buffer(f"copied_{index}", buffer.detach().clone())
