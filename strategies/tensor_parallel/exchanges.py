"""Exchanges of activations between the ranks of a tensor parallel group, each with its matching gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.errors import ModuleError
from ..torch_internals.dtensors import split_axis
from ..torch_internals.tensors import read_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Change = Callable[[Tensor], Tensor]

# torch 2.14 deprecates the names that torch 2.11 has
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorGroup:
    """The ranks that hold the parts of one layer.

    Between layers, a tensor is whole (equal on all ranks, as is its gradient), cut along a dimension, or a partial sum
    on each rank. Every method is collective: all ranks of the group call it, in the same order.
    Source: Shoeybi et al., "Megatron-LM", 2019; for shards of the sequence Korthikanti et al., 2022.

    Args:
        mesh: a DeviceMesh with one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self.device = torch.device(mesh.device_type)
        self._group = mesh.get_group()
        self._with_copies: dict[int, tuple[DeviceMesh, TensorGroup]] = {}
        self._shared: dict[tuple[int, int | None, int], tuple[Tensor, Tensor]] | None = None

    def mesh_of(self, copies: int) -> DeviceMesh:
        """Return the mesh of parameters of which `copies` neighboring ranks hold the same part.

        The first call for a number makes process groups: every rank of the run makes it, also those of other stages.
        """
        return self.mesh if copies == 1 else self._divided(copies)[0]

    def holders(self, copies: int) -> TensorGroup:
        """Return the `copies` neighboring ranks, this one among them, that hold the same part; see `mesh_of`."""
        return self._divided(copies)[1]

    def _divided(self, copies: int) -> tuple[DeviceMesh, TensorGroup]:
        if copies not in self._with_copies:
            assert self.mesh.mesh_dim_names is not None
            (axis,) = self.mesh.mesh_dim_names
            names = f"{axis}_heads_of_{copies}", f"{axis}_copies_of_{copies}"
            mesh = split_axis(self.mesh, (self.size // copies, copies), names)
            self._with_copies[copies] = mesh, TensorGroup(mesh[names[1]])
        return self._with_copies[copies]

    @contextmanager
    def sharing_inputs(self) -> Iterator[None]:
        """Exchange a tensor only once, even if several layers request its copy; its gradients are summed once, too."""
        before, self._shared = self._shared, {}
        try:
            yield
        finally:
            self._shared = before

    def copy(self, whole: Tensor) -> Tensor:
        """Return a whole tensor for layers that differ between ranks; its gradients are summed."""
        return self._share(whole, None, _return_unchanged, self._sum)

    def sum(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, as a whole tensor."""
        return self._exchange(summand, self._sum, _return_unchanged)

    def split(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return self._exchange(whole, partial(self._own, dim=dim), partial(self._join, dim=dim))

    def join(self, cut: Tensor, dim: int, length: int | None = None) -> Tensor:
        """Return the whole tensor made of the ranks' parts; of this length, if they may differ, see `chunk_bounds`."""
        if length is None or length % self.size == 0:
            return self._exchange(cut, partial(self._join, dim=dim), partial(self._own, dim=dim))
        join = partial(self._join_uneven, dim=dim, length=length)
        return self._exchange(cut, join, partial(self._own_uneven, dim=dim, length=length))

    def join_copy(self, cut: Tensor, dim: int) -> Tensor:
        """Return the whole tensor made of the ranks' parts, for layers that differ between ranks."""
        return self._share(cut, dim, partial(self._join, dim=dim), partial(self._sum_split, dim=dim))

    def sum_split(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the sum of the ranks' tensors."""
        return self._exchange(summand, partial(self._sum_split, dim=dim), partial(self._join, dim=dim))

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of the ranks' values, without a gradient."""
        largest = value.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest

    def _share(self, tensor: Tensor, dim: int | None, change: _Change, change_gradient: _Change) -> Tensor:
        key = (id(tensor), dim, read_version(tensor))  # it may change in place
        if self._shared is None:
            return self._exchange(tensor, change, change_gradient)
        if key not in self._shared:  # the tensor is kept, otherwise another one could get its id
            self._shared[key] = tensor, self._exchange(tensor, change, change_gradient)
        return self._shared[key][1]

    def _exchange(self, tensor: Tensor, change: _Change, change_gradient: _Change) -> Tensor:
        if self.size == 1:
            return tensor
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return change(tensor)
        return _Exchange.apply(tensor, change, change_gradient)  # type: ignore[no-any-return]

    def _sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def _join(self, tensor: Tensor, dim: int) -> Tensor:
        joined = tensor.new_empty((self.size * len(tensor), *tensor.shape[1:]))
        _all_gather(joined, tensor.contiguous(), group=self._group)
        return torch.cat(joined.chunk(self.size), dim) if dim % tensor.dim() else joined

    def _join_uneven(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = -(-length // self.size)
        padded = tensor.new_zeros(shape)
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return self._join(padded, dim).narrow(dim, 0, length)  # only the last parts are shorter

    def _own_uneven(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        start, stop = chunk_bounds(length, self.size, self.rank)
        return tensor.narrow(dim, start, stop - start).contiguous()

    def _sum_split(self, tensor: Tensor, dim: int) -> Tensor:
        self._check_divides(tensor, dim)
        by_rank = torch.cat(tensor.chunk(self.size, dim)) if dim % tensor.dim() else tensor.contiguous()
        own = tensor.new_empty((len(by_rank) // self.size, *by_rank.shape[1:]))
        _reduce_scatter(own, by_rank, group=self._group)
        return own

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        self._check_divides(tensor, dim)
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def _check_divides(self, tensor: Tensor, dim: int) -> None:
        if tensor.shape[dim] % self.size:
            raise ModuleError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dimension {dim}: its length must be a "
                f"multiple of tp={self.size}; pad it, or set sequence_parallel=False."
            )


class _Exchange(torch.autograd.Function):
    """Applies one function to a tensor in forward, and another one to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: _Change, change_gradient: _Change) -> Tensor:
        ctx.change, ctx.change_gradient = change, change_gradient
        changed = change(tensor)
        return tensor.view_as(tensor) if changed is tensor else changed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        if torch.is_grad_enabled() and gradient.requires_grad:  # which is differentiated again
            return _Exchange.apply(gradient, ctx.change_gradient, ctx.change), None, None
        return ctx.change_gradient(gradient), None, None


def chunk_bounds(length: int, number: int, index: int) -> tuple[int, int]:
    """Return the bounds of one of `number` parts as in ``torch.chunk``; the last ones may be shorter, or empty."""
    width = -(-length // number)
    return min(index * width, length), min((index + 1) * width, length)


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor
