"""Private names of torch.distributed.pipelining: the order of its schedules, and a backward in two parts.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .versions import names_of_torch


class _OrderStage:
    """The attributes of a stage that torch's schedules read to determine the order of a rank's work."""

    submod = None
    has_backward = True

    def __init__(self, stage: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_size, self.group_rank = num_ranks, 0
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def compute_pipeline_order(
    schedule: str, num_ranks: int, stages_a_rank: int, num_micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """Return each rank's order of computation under one of torch's schedules: kind, stage and micro-batch."""
    with names_of_torch:
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = [_OrderStage(stage, num_ranks * stages_a_rank, num_ranks) for stage in range(stages_a_rank)]
        made: Any = get_schedule_class(schedule)(stages, num_micro_batches, loss_fn=_order_stage_loss)
        orders = made.pipeline_order

    def plain(action: Any) -> list[tuple[str, int, int]]:
        if action is None:
            return []
        if action.sub_actions is not None:
            return [each for part in action.sub_actions for each in plain(part)]
        return [(action.computation_type.value, action.stage_index, action.microbatch_index)]

    return [[each for action in orders[rank] for each in plain(action)] for rank in range(num_ranks)]


def _order_stage_loss(*_: object) -> None:
    pass


def add_transfers(
    orders: Iterable[Iterable[tuple[str, int, int]]], rank_of: Callable[[int], int], num_stages: int
) -> list[list[tuple[str, int, int]]]:
    """Return the orders with transfers between ranks added, placed so that any two ranks transfer in the same order."""
    with names_of_torch:
        from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType
    actions = {
        rank: [_Action(stage, _ComputationType(kind), index) for kind, stage, index in order]
        for rank, order in enumerate(orders)
    }
    placed: dict[int, list[Any]] = _add_send_recv(actions, stage_to_rank=rank_of, num_stages=num_stages)
    return [
        [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in placed[rank]]
        for rank in sorted(placed)
    ]


def compute_input_gradients(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterable[torch.nn.Parameter],
) -> object:
    """Compute the gradients of inputs, into ``.grad``; return what `add_weight_gradients` needs to continue."""
    with names_of_torch:
        from torch.distributed.pipelining._backward import stage_backward_input
    return stage_backward_input(outputs, gradients, inputs, iter(weights))[1]


def add_weight_gradients(weights: Iterable[torch.nn.Parameter], rest: Any) -> None:
    """Add the gradients of weights that `compute_input_gradients` left out."""
    with names_of_torch:
        from torch.distributed.pipelining._backward import stage_backward_weight
    stage_backward_weight(iter(weights), rest)
