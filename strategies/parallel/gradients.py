"""Gradients averaged over ranks after a backward, where no wrapper does it during one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..distributed.collectives import Collectives


def average_gradients(parameters: Iterable[nn.Parameter], collectives: Collectives) -> None:
    """Replace each gradient by its mean over ranks, one collective a dtype. Collective: every rank calls it.

    A parameter without a gradient on some ranks counts as 0 there; without one on any, it keeps none. Several backwards
    in a row add up as they should: what has been averaged already is equal on all ranks, and stays it.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for group in by_dtype.values():
        _average(group, collectives)


def _average(parameters: list[nn.Parameter], collectives: Collectives) -> None:
    like = parameters[0]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], dtype=like.dtype, device=like.device)
    parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flat = collectives.all_reduce(torch.cat([*parts, has_gradient]), "mean")
    averaged = flat[: -len(parameters)].split([p.numel() for p in parameters])
    for parameter, gradient, share in zip(parameters, averaged, flat[-len(parameters) :].tolist(), strict=True):
        if not share:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient.view_as(parameter))
