"""ModelAverage: averages the parameters of replicas every few steps, with torch's model averagers."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.nested import named_leaves


class ModelAverage:
    """Averages the parameters of one optimizer over the ranks whenever torch's averager says that it is due.

    Collective: every rank makes one, and calls `end_step` after each step of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, period: int | Mapping[int, int], warmup_steps: int) -> None:
        self._optimizer, self._warmup_steps = optimizer, warmup_steps
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="When.* period .*is 1")  # useful to compare a run with DDP
            self._averager = _make_averager(period, warmup_steps)

    @property
    def num_steps(self) -> int:
        """The number of steps that the optimizer has taken."""
        return int(self._averager.step)

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._averager.step = number

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step still needs the gradients of all ranks."""
        return self.num_steps < self._warmup_steps

    def end_step(self) -> None:
        """Count a step, and average if that is due."""
        parameters = self._parameters()
        if not parameters:  # all are frozen
            self.num_steps += 1
            return
        pairs: list[tuple[Tensor, Tensor]] = []

        def stand_ins() -> Iterator[nn.Parameter]:
            # averagers replace the memory of parameters, and skip those without a gradient, which can differ by rank
            for parameter in parameters:
                stand_in = nn.Parameter(parameter.detach(), requires_grad=False)
                stand_in.grad = parameter.detach()
                pairs.append((parameter, stand_in))
                yield stand_in

        self._averager.average_parameters(stand_ins())
        with torch.no_grad():
            for parameter, average in pairs:
                parameter.copy_(average)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that differ between ranks before an average: parameters and their optimizer state."""
        tensors: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters()):
            tensors[f"{index}"] = parameter.detach()
            for name, value in named_leaves(self._optimizer.state.get(parameter, {})):
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    tensors[f"{index}{name}"] = value
        return tensors

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]


def _make_averager(period: int | Mapping[int, int], warmup_steps: int) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

    if isinstance(period, int):
        return PeriodicModelAverager(period, warmup_steps)
    return HierarchicalModelAverager(OrderedDict(sorted(period.items())), warmup_steps)
