"""Joining the tensors of a nested structure into buckets, and splitting them again."""

import torch

from echelon.strategies.distributed.buckets import join_in_buckets, map_joined
from echelon.strategies.distributed.nested import named_leaves, with_leaves


def test_small_tensors_of_one_type_go_as_one_and_large_ones_alone():
    large = torch.ones(2**19)
    tensors = [torch.full((3,), float(i)) for i in range(100)]
    tensors += [torch.arange(6).reshape(2, 3).T, large, large.clone(), torch.tensor(7)]
    buckets = list(join_in_buckets(tensors))
    assert [len(bucket.indices) for bucket in buckets] == [100, 2, 1, 1]
    assert buckets[1].flat.tolist() == [0, 3, 1, 4, 2, 5, 7]
    assert all(bucket.flat.data_ptr() != large.data_ptr() for bucket in buckets)  # a function may overwrite them

    doubled = map_joined(tensors, lambda flat: flat.mul_(2))
    for result, tensor in zip(doubled, tensors, strict=True):
        assert torch.equal(result.reshape(tensor.shape), 2 * tensor)
        assert result.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_parts_of_the_first_dimension_lie_together():
    [bucket] = join_in_buckets([torch.arange(4), torch.arange(10, 18).reshape(4, 2)], num_rows=2)
    assert bucket.flat.tolist() == [0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17]


def test_leaves_have_the_names_by_which_the_user_reaches_them():
    data = {"loss": [1.0, (torch.ones(1), None)], 3: {}}
    assert [name for name, _ in named_leaves(data)] == ["['loss'][0]", "['loss'][1][0]", "['loss'][1][1]"]
    assert with_leaves(data, ["a", "b", "c"]) == {"loss": ["a", ("b", "c")], 3: {}}
