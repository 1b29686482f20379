"""Tensors that wrap others are kept as they are, whole, in blocks and by name, and nothing from a file runs code."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from echelon import export, load_weights
from echelon.common.errors import CheckpointError
from echelon.strategies.snapshots.snapshots import MemorySnapshots
from echelon.strategies.state.dtensor import shard_like
from echelon.strategies.state.lazy_tensor import Block, StoredTensor, read_block
from echelon.strategies.wrapped.wrapped_tensors import dequantize_tensor, take_apart
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import MemoryWriter, load, save
from echelon.trainer.checkpoint.encoding import encode_value
from echelon.trainer.checkpoint.tags import decode_value
from echelon.trainer.cli.checkpoint_contents import compare_checkpoints, show_checkpoint, verify_all

pytest.importorskip("torchao")


def of_optimizer(kind):
    state = kind.zeros((128, 64))
    state.copy_(torch.randn(128, 64))
    return state


def of_layer(config):
    from torchao.quantization import quantize_

    layer = nn.Sequential(nn.Linear(64, 128)).bfloat16()
    quantize_(layer, config)
    return layer[0].weight.detach()


def all_kinds():
    """Return a tensor of 128 x 64 of each class that torch and torchao make on a CPU, and the rows of its blocks."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    torch.manual_seed(0)
    return {
        "8 bits": (of_optimizer(OptimState8bit), 4),
        "4 bits": (of_optimizer(OptimState4bit), 2),
        "fp8": (of_optimizer(OptimStateFp8), 4),
        "nf4": (to_nf4(torch.randn(128, 64), 64, 32), 32),
        "int8": (of_layer(Int8WeightOnlyConfig()), 1),
        "int8 for int8": (of_layer(Int8DynamicActivationInt8WeightConfig()), 1),
        "float8": (of_layer(Float8WeightOnlyConfig()), 1),
        "two": (TwoTensor(torch.randn(128, 64), torch.randn(128, 64)), 1),
    }


@pytest.fixture(scope="module")
def kinds():
    return all_kinds()


def is_same(one, other):
    ours, theirs = take_apart(one), take_apart(other)
    names = ours.tensors.keys()
    return (
        (ours.kind, ours.context, ours.shape) == (theirs.kind, theirs.context, theirs.shape)
        and names == theirs.tensors.keys()
        and all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in names)
        and all(ours.tensors[name].dtype == theirs.tensors[name].dtype for name in names)
    )


def test_every_kind_comes_back_bit_for_bit(kinds, tmp_path):
    state = {name: tensor for name, (tensor, _) in kinds.items()}
    save(tmp_path / "a.ckpt", {"model": state})
    for lazy in ((), ("model",)):
        read = load(tmp_path / "a.ckpt", lazy=lazy)["model"]
        for name, tensor in state.items():
            found = read[name].whole() if lazy else read[name]
            assert is_same(found, tensor), name
    assert verify_all([tmp_path / "a.ckpt"])[1]


def test_blocks_that_cut_no_quantization_block_stay_quantized_and_join_again(kinds):
    for name, (tensor, rows) in kinds.items():
        for parts in ((rows, 128 - rows), (64, 32, 32)):
            begins = [sum(parts[:number]) for number in range(len(parts))]
            blocks = [read_block(tensor, [at, 0], [size, 64]) for at, size in zip(begins, parts, strict=True)]
            assert {type(block) for block in blocks} == {type(tensor)}, name
            if not isinstance(tensor, TwoTensor):
                values = [dequantize_tensor(block) for block in blocks]
                assert torch.equal(torch.cat(values), dequantize_tensor(tensor)), name
            stored = StoredTensor([Block(block, [at, 0]) for block, at in zip(blocks, begins, strict=True)])
            assert is_same(stored.whole(), tensor), name
            assert not stored.was_dequantized


def test_a_cut_inside_a_quantization_block_gives_plain_values(kinds):
    for name in ("8 bits", "4 bits", "fp8", "nf4"):
        tensor, _ = kinds[name]
        stored = StoredTensor([Block.whole(tensor)])
        for offsets, sizes in (([1, 0], [7, 64]), ([0, 16], [128, 16])):
            block = read_block(stored, offsets, sizes)
            assert type(block) is torch.Tensor
            assert torch.equal(block, dequantize_tensor(tensor)[offsets[0] :, offsets[1] :][: sizes[0], : sizes[1]])
        assert stored.was_dequantized


def test_elementwise_wrappers_are_cut_along_any_dimension(kinds):
    tensor, _ = kinds["two"]
    block = read_block(tensor, [3, 5], [7, 9])
    assert torch.equal(block.a, tensor.a[3:10, 5:14])
    assert torch.equal(block.b, tensor.b[3:10, 5:14])


def test_commands_show_compare_and_export_them(kinds, tmp_path):
    tensor, _ = kinds["int8"]
    changed = read_block(tensor, [0, 0], tensor.shape)
    changed.qdata[0, 0] += 1
    save(tmp_path / "a.ckpt", {"model": {"0.weight": tensor, "0.bias": torch.ones(2)}})
    save(tmp_path / "b.ckpt", {"model": {"0.weight": changed, "0.bias": torch.ones(2)}})
    shown = "\n".join(show_checkpoint(tmp_path / "a.ckpt", shows_all=True))
    assert "0.weight: Int8Tensor, bfloat16 (128, 64), {" in shown
    assert "0.weight.qdata: int8 (128, 64)" in shown
    assert compare_checkpoints(tmp_path / "a.ckpt", tmp_path / "a.ckpt")[1]
    (line, _), _ = compare_checkpoints(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert line.startswith("~ model.0.weight.qdata: int8 (128, 64): 1 bytes differ")
    export(tmp_path / "a.ckpt", tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    assert torch.equal(plain["0.weight.qdata"], tensor.qdata)
    read = load_weights(tmp_path / "model.safetensors")
    assert sorted(read) == ["0.bias", "0.weight"]
    assert is_same(read["0.weight"], tensor)


def edited(change):
    """Return what reading a tensor gives whose description was changed."""
    encoded, blocks = encode_value(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)), "x", "x")
    change(encoded["$wrapped"]["blocks"][""])
    return decode_value(json.loads(json.dumps(encoded)), lambda key: blocks[key].tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "torch:Tensor"}, "no class of torch or torchao"),
        ({"class": "torch.distributed.tensor:DTensor"}, "no class of torch or torchao"),
        ({"class": "subprocess:Popen"}, "no class of torch or torchao"),
        ({"class": "torchao.optim.subclass_8bit:NoSuchState"}, "install torchao as it was"),
        ({"context": {"$object": ["subprocess:Popen", {"args": ["touch", "/tmp/no"]}]}}, "is not of its package"),
        ({"context": {"$object": ["dataclasses:Field", {}]}}, "is not of its package"),
        ({"tensors": {}}, "TwoTensor cannot be made of"),
        ({"tensors": {"a": 1, "b": 2}}, "an inner tensor that is none"),
        ({"shape": [2, 3]}, "do not add up"),
        ({"shape": [-1, 2]}, "a whole number from 0"),
        ({"offsets": [0]}, r"a block of \(2, 2\)"),
        ({"offsets": [1, 0]}, "do not add up"),
        ({"stride": "a"}, "must be a list"),
    ],
)
def test_a_forged_description_is_an_error_and_runs_nothing(change, message):
    with pytest.raises(CheckpointError, match=message):
        edited(lambda block: block.update(change))


def test_a_class_that_is_not_here_is_named_and_the_rest_can_be_shown(tmp_path):
    save(tmp_path / "a.ckpt", {"model": {"w": TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))}})
    text = (tmp_path / "a.ckpt" / "state.json").read_text().replace("two_tensor:TwoTensor", "two_tensor:Gone")
    encoded = json.loads(text)["model"]
    tensors = {"w.a": torch.ones(2, 2), "w.b": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="'torch.testing._internal.two_tensor:Gone'.*register_tensor_class"):
        decode_value(encoded, tensors.__getitem__)
    opened = decode_value(encoded, tensors.__getitem__, wrapped=dict, object=list)
    assert torch.equal(opened["w"]["blocks"][""]["tensors"]["a"], torch.ones(2, 2))


@dataclass
class Group:
    """What snapshots ask of the processes of a run."""

    rank: int
    world_size: int
    cpu_group: object
    device_group: object = None


def snapshot_of_shards(folder):
    """Return whether each rank finds its shard in a snapshot in memory, quantized as it was, and a whole tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local = read_block(all_kinds()["8 bits"][0], [64 * rank, 0], [64, 64])
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(128, 64), stride=(64, 1))
    whole = TwoTensor(torch.arange(6.0), torch.ones(6))
    group = Group(rank, 2, dist.group.WORLD)
    writer = MemoryWriter(MemorySnapshots(Path(folder), 0, group, 0))
    writer.save({"model": {"whole": whole}, "optimizers": [{"m": shard}], "loop": {}}, 1)
    writer.close()
    found = MemorySnapshots(Path(folder), 1, group, 0).agree()
    state = load(found.path, lazy=("model", "optimizers"), verify=False)
    mine = shard_like(state["optimizers"][0]["m"], shard).to_local()
    same = is_same(mine, local) and is_same(state["model"]["whole"].whole(), whole)
    dist.destroy_process_group()
    return same


def test_snapshots_in_memory_hold_quantized_shards(memory_path):
    assert run_ranks(snapshot_of_shards, 2, str(memory_path / "node")) == [True, True]
