"""Each private name of torch's tensors, modules, operators and optimizers is where we look for it."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.strategies.torch_internals import modules, operators, optimizers, tensors, utils, versions


def test_tensors():
    tensor = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        tensor.add_(1)
    with torch.inference_mode():
        uncounted = torch.ones(1).add_(1)
    assert (tensors.read_version(tensor), tensors.read_version(uncounted)) == (1, 0)

    part = tensor[1:]
    assert tensors.find_base(part) is tensors.find_base(tensor) is tensor
    assert tensors.is_view(part)
    assert not tensors.is_view(tensor)
    same = tensors.hide_view(part)
    assert not tensors.is_view(same)
    assert len({tensors.read_memory_id(each) for each in (same, tensor, tensor.untyped_storage())}) == 1
    empty = [torch.empty(2, device="meta") for _ in range(2)]
    assert tensors.read_memory_id(empty[0]) != tensors.read_memory_id(empty[1])
    assert tensors.compute_norms([torch.tensor([3.0, 4.0])])[0] == 5
    assert type(tensors.make_instance(nn.Parameter, torch.ones(1))) is nn.Parameter


def test_writes_that_do_not_count():
    tensor = torch.ones(2)
    with tensors.keep_version(tensor):
        tensor.mul_(2)
    assert tensors.list_versions([tensor, tensor.mul_(2)]) == [1, 1]


def test_hooks_of_tensors():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    seen = []
    assert tensors.find_hooks(weights[0]) == {}
    assert not tensors.have_gradient_hooks(weights)
    weights[0].register_hook(seen.append)
    weights[0].register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    assert tensors.have_gradient_hooks(weights)
    tensors.set_hooks(weights[1], tensors.find_hooks(weights[0]))
    tensors.share_gradient_hooks([(weights[0], weights[2]), (weights[2], weights[0])])
    sum(weights).backward()
    assert torch.stack(seen).tolist() == [[1.0]] * 5  # the third has no hook for what is accumulated


def test_operations_on_several_tensors():
    some = [torch.tensor([1.0, -3.0]), torch.tensor([2.0])]
    tensors.scale_together(some, 2.0)
    tensors.scale_together(some, torch.tensor(0.5))
    tensors.clamp_together(some, 2.0)
    assert [each.tolist() for each in some] == [[1, -2], [2]]
    tensors.move_together(some, [torch.zeros(2), torch.zeros(1)], 0.5)
    assert [each.tolist() for each in some] == [[0.5, -1], [1]]
    tensors.copy_together(some, [torch.ones(2), torch.ones(1)])
    assert [each.tolist() for each in some] == [[1, 1], [1]]


def test_where_a_generator_is():
    generators = [torch.Generator() for _ in range(2)]
    assert len({tensors.find_generator_address(each) for each in generators} - {0}) == 2


def test_sparse_tensors():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    indices, values = tensors.read_components(sparse)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1, 2])
    tensors.find_values(sparse).mul_(2)
    assert sparse.to_dense().tolist() == [6, 0, 0]
    assert tensors.find_values(values) is values


def test_modules():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    norm, linear = module
    assert modules.find_child_dict(module) == {"0": norm, "1": linear}
    assert modules.find_parameter_dict(linear) == {"weight": linear.weight, "bias": None}
    assert modules.find_buffer_dict(norm)["running_mean"] is norm.running_mean
    norm.register_buffer("cache", torch.ones(1), persistent=False)
    assert modules.is_persistent(norm, "running_mean")
    assert not modules.is_persistent(norm, "cache")

    modules.apply_to_own_tensors(module, torch.Tensor.double)
    assert linear.weight.dtype is torch.float32
    modules.apply_to_own_tensors(linear, torch.Tensor.double)
    modules.apply_to_tensors(module[:1], torch.Tensor.half)
    assert (linear.weight.dtype, norm.weight.dtype) == (torch.float64, torch.float16)

    copied = modules.copy_without_parameters(linear)
    assert (type(copied), modules.find_parameter_dict(copied)) == (nn.Linear, {})


def test_what_is_set_in_place_of_a_call():
    module, batch = nn.Flatten(0), torch.ones(2, 2)
    module.register_forward_hook(lambda *given: given[-1] + 1)
    modules.set_compiled_call(module, lambda given: modules.call_uncompiled(module, given) + 1)
    assert modules.find_compiled_call(module) is not None
    assert module(batch).tolist() == [3] * 4
    modules.drop_compiled_call(module)
    assert modules.find_compiled_call(module) is None
    assert module(batch).tolist() == [2] * 4
    assert modules.find_uncompiled(torch.compile(module)) is module
    assert modules.find_uncompiled(module) is None


def test_modules_that_were_not_initialized():
    class Early(nn.Module):
        def __init__(self):
            pass

    assert not modules.was_initialized(Early())
    assert modules.was_initialized(nn.Linear(1, 1))


def test_another_function_behind_trunc_normal():
    own = modules.find_trunc_normal()
    modules.set_trunc_normal(lambda tensor, *_, **__: tensor.fill_(3))
    try:
        assert nn.init.trunc_normal_(torch.zeros(1)).item() == 3
    finally:
        modules.set_trunc_normal(own)
    assert nn.init.trunc_normal_(torch.zeros(1)).item() != 3


def test_operators():
    operator = torch.ops.aten.add_.Tensor
    assert next((one.name, one.is_write) for one in operators.list_arguments(operator)) == ("self", True)
    assert operators.read_schema_name(operator) == "aten::add_"


def test_optimizers():
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), fused=True)
    assert not optimizers.has_step_hooks(optimizer)
    assert all(hooks is not None for hooks in optimizers.list_step_hooks(optimizer))
    optimizer.register_step_pre_hook(lambda *_: None)
    assert optimizers.has_step_hooks(optimizer)
    assert list(map(len, optimizers.list_step_hooks(optimizer))) == [1, 0, 0, 0]

    assert optimizers.takes_scaled_gradients(optimizer)
    replaced = optimizers.replace_step(optimizer, lambda: optimizers.note_step(optimizer))
    assert not optimizers.takes_scaled_gradients(optimizer)
    step = optimizer.step
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert optimizer.step is step
    assert not optimizers.has_noted_step(optimizer, step)
    optimizer.step()
    assert optimizers.has_noted_step(optimizer, step)
    scheduler.step()  # it would warn
    optimizers.put_step_back(optimizer, replaced)
    assert optimizer.step is not step
    assert optimizers.takes_scaled_gradients(optimizer)


def test_schedulers_inside_of_others():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    assert optimizers.list_inner_schedulers(outer) == inner
    assert len(optimizers.list_inner_schedulers(inner[0])) == 0


def test_loaders():
    loader = torch.utils.data.DataLoader(torch.ones(2, 1), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert utils.has_workers(iterator)
    assert utils.find_index_sampler(iterator) is loader.batch_sampler
    utils.drop_iterator(loader)
    assert iter(loader) is not iterator
    utils.drop_iterator(loader)
    assert not utils.has_workers(iter([1]))


ROOM = Path(versions.__file__).parent


@pytest.mark.parametrize("file", sorted(ROOM.glob("*.py")), ids=lambda file: file.stem)
def test_each_function_says_in_which_versions_of_torch_its_names_were_seen(file):
    tree = ast.parse(file.read_text())
    says = re.compile(r"torch (>= )?2\.\d+")
    if says.search(ast.get_docstring(tree)):
        return  # all of its names
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert [node.name for node in functions if not says.search(ast.get_docstring(node))] == []
