"""A stored tensor is read where it is used, and is an ordinary tensor to everything else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from echelon.strategies.state.lazy_tensor import StoredTensor, read_block

FULL = torch.arange(70.0).view(7, 5, 2)


def stored() -> StoredTensor:
    """Return a tensor in blocks, cut in two directions."""
    rows, columns = ((0, 3), (3, 4), (4, 7)), ((0, 2), (2, 5))
    return StoredTensor([(FULL[a:b, c:d].clone(), (a, c, 0)) for (a, b), (c, d) in product(rows, columns)])


def has_been_read(tensor: StoredTensor) -> bool:
    return tensor._whole is not None


def test_any_block_is_read_from_the_blocks_that_it_overlaps() -> None:
    tensor = stored()
    for (a, b), (c, d) in product([(i, j) for i in range(8) for j in range(i, 8)], [(0, 5), (1, 3), (2, 2), (4, 5)]):
        block = read_block(tensor, (a, c, 0), (b - a, d - c, 2))
        assert type(block) is Tensor
        assert torch.equal(block, FULL[a:b, c:d])
    assert not has_been_read(tensor)


def test_a_block_of_a_plain_tensor_is_a_copy() -> None:
    whole = FULL.clone()
    block = read_block(whole, (1, 0, 0), (2, 5, 1))
    assert torch.equal(block, FULL[1:3, :, :1])
    block.zero_()
    assert torch.equal(whole, FULL)


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: (t.shape, t.size(1), len(t), t.ndim, t.dim(), t.numel(), t.element_size()),
        lambda t: (t.dtype, t.device, t.layout, t.requires_grad, t.is_meta, t.is_cuda, t.is_floating_point()),
    ],
)
def test_what_it_is_is_told_without_reading(ask: Callable[[Tensor], object]) -> None:
    tensor = stored()
    assert ask(tensor) == ask(FULL)
    assert not has_been_read(tensor)


def test_it_is_copied_without_being_kept() -> None:
    tensor, layer = stored(), nn.Embedding(7, 5)
    target = torch.zeros(7, 5, 2)
    assert torch.equal(target.copy_(tensor), FULL)
    assert torch.equal(tensor.clone(), FULL)
    assert torch.equal(tensor.detach().cpu().clone(), FULL)
    rows = StoredTensor([(FULL[:4, :, 0], (0, 0)), (FULL[4:, :, 0], (4, 0))])
    layer.load_state_dict({"weight": rows})
    assert torch.equal(layer.weight.detach(), FULL[..., 0])
    assert not has_been_read(tensor)
    assert not has_been_read(rows)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: 1 - t,
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack(tensors=[t, FULL]),
        lambda t: t[1:3, ::2],
        lambda t: torch.zeros(2, 5, 2).copy_(t[:2]),
        lambda t: torch.zeros(3, 7, 5, 2).copy_(t),
        lambda t: torch.zeros(7, 5, 2).copy_(t, non_blocking=True),
        lambda t: torch.zeros(7, 5, 2).copy_(t, True),
        lambda t: t.to(torch.float64),
        lambda t: torch.tensor(t.tolist()),
        lambda t: torch.from_numpy(t.numpy()),
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: torch.equal(input=t, other=FULL),
        repr,
    ],
)
def test_everything_else_sees_a_plain_tensor(use: Callable[[Tensor], object]) -> None:
    found, expected = use(stored()), use(FULL.clone())
    if isinstance(expected, Tensor):
        assert type(found) is Tensor
        assert torch.equal(found, expected)  # type: ignore[arg-type]
    else:
        assert found == expected


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mul_(2), lambda t: t.view(-1).mul_(2), lambda t: t[:].mul_(2), lambda t: t.data.mul_(2)],
)
def test_changes_are_kept_and_leave_the_blocks_alone(change: Callable[[Tensor], object]) -> None:
    block = FULL.clone()
    for tensor in (StoredTensor([(block, (0, 0, 0))]), stored()):
        change(tensor)
        assert torch.equal(read_block(tensor, (2, 0, 0), (3, 5, 2)), 2 * FULL[2:5])
        assert torch.equal(torch.zeros(7, 5, 2).copy_(tensor), 2 * FULL)
        assert torch.equal(tensor, 2 * FULL)
    assert torch.equal(block, FULL)


def test_a_number_is_a_block() -> None:
    tensor = StoredTensor([(torch.tensor(3.0), ())])
    assert read_block(tensor, (), ()).item() == 3.0
    assert tensor.clone().item() == tensor.item() == 3.0
