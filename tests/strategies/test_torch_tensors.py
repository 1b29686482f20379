"""Each private field of torch's tensors, modules, operators and optimizers is where we look for it."""

import torch
from torch import nn

from echelon.strategies import torch_tensors as fields


def test_tensors():
    tensor = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        tensor.add_(1)
    with torch.inference_mode():
        uncounted = torch.ones(1).add_(1)
    assert (fields.version_of(tensor), fields.version_of(uncounted)) == (1, 0)

    part = tensor[1:]
    assert fields.base_of(part) is fields.base_of(tensor) is tensor
    assert fields.is_view(part)
    assert not fields.is_view(tensor)
    same = fields.same_without_view(part)
    assert not fields.is_view(same)
    assert fields.memory_id(same) == fields.memory_id(tensor) == fields.memory_id(tensor.untyped_storage())
    empty = [torch.empty(2, device="meta") for _ in range(2)]
    assert fields.memory_id(empty[0]) != fields.memory_id(empty[1])
    assert fields.norms_of([torch.tensor([3.0, 4.0])])[0] == 5
    assert type(fields.as_instance(nn.Parameter, torch.ones(1))) is nn.Parameter


def test_sparse_tensors():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    indices, values = fields.components_of(sparse)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1, 2])
    fields.values_of(sparse).mul_(2)
    assert sparse.to_dense().tolist() == [6, 0, 0]
    assert fields.values_of(values) is values


def test_modules():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    norm, linear = module
    assert fields.children_by_name(module) == {"0": norm, "1": linear}
    assert fields.parameters_by_name(linear) == {"weight": linear.weight, "bias": None}
    assert fields.buffers_by_name(norm)["running_mean"] is norm.running_mean
    norm.register_buffer("cache", torch.ones(1), persistent=False)
    assert fields.is_persistent(norm, "running_mean")
    assert not fields.is_persistent(norm, "cache")

    fields.apply_to_own_tensors(module, torch.Tensor.double)
    assert linear.weight.dtype is torch.float32
    fields.apply_to_own_tensors(linear, torch.Tensor.double)
    fields.apply_to_tensors(module[:1], torch.Tensor.half)
    assert (linear.weight.dtype, norm.weight.dtype) == (torch.float64, torch.float16)

    copied = fields.copy_without_parameters(linear)
    assert (type(copied), fields.parameters_by_name(copied)) == (nn.Linear, {})


def test_what_is_set_in_place_of_a_call():
    module, batch = nn.Flatten(0), torch.ones(2, 2)
    module.register_forward_hook(lambda *given: given[-1] + 1)
    fields.set_compiled_call(module, lambda given: fields.call_uncompiled(module, given) + 1)
    assert fields.compiled_call_of(module) is not None
    assert module(batch).tolist() == [3] * 4
    fields.drop_compiled_call(module)
    assert fields.compiled_call_of(module) is None
    assert module(batch).tolist() == [2] * 4
    assert fields.compiled_from(torch.compile(module)) is module
    assert fields.compiled_from(module) is None


def test_operators():
    operator = torch.ops.aten.add_.Tensor
    assert next((one.name, one.is_write) for one in fields.arguments_of(operator)) == ("self", True)
    assert fields.schema_name(operator) == "aten::add_"


def test_optimizers():
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), fused=True)
    assert not fields.has_step_hooks(optimizer)
    assert all(hooks is not None for hooks in fields.step_hooks(optimizer))
    optimizer.register_step_pre_hook(lambda *_: None)
    assert fields.has_step_hooks(optimizer)
    assert list(map(len, fields.step_hooks(optimizer))) == [1, 0, 0, 0]

    assert fields.takes_scaled_gradients(optimizer)
    replaced = fields.replace_step(optimizer, lambda: fields.note_step(optimizer))
    assert not fields.takes_scaled_gradients(optimizer)
    step = optimizer.step
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert optimizer.step is step
    assert not fields.has_noted_step(optimizer, step)
    optimizer.step()
    assert fields.has_noted_step(optimizer, step)
    scheduler.step()  # it would warn
    fields.put_step_back(optimizer, replaced)
    assert optimizer.step is not step
    assert fields.takes_scaled_gradients(optimizer)
