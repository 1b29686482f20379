"""Cutting of a module: parameters become DTensors in place, and layers run on this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from ...common.errors import ConfigError, ModuleError
from ..module.traces import change_for_good
from ..state.dtensor import is_dtensor
from ..targets.in_place_of_logits import asked_of
from ..torch_internals.dtensors import register_anomaly_check
from .attention import AttentionCut
from .exchanges import TensorGroup
from .layers import CutLayer, Forward, Slices, SummedGradients, WholeLayer
from .tensor_plan import TensorPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHOLE: Final = WholeLayer({})


def cut_module(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, copies: Iterable[int] = ()) -> None:
    """Cut a module, which is equal on all ranks, according to a plan; meta tensors are cut as well.

    Parameters that are not cut stay plain. Collective: every rank calls it.

    Args:
        module: the module that the plan was found for.
        plan: see `find_plan`.
        mesh: a DeviceMesh with only the axis ``tp``.
        copies: how many ranks hold one part of a layer, wherever several do, also in layers that other ranks hold: all
            ranks make process groups for them, in this order.
    """
    register_anomaly_check()
    group = TensorGroup(mesh)
    layers, numbers = plan.layers(module, group.size), plan.numbers_on_a_rank(module, group.size)
    for number in copies:
        group.mesh_of(number)
    slices = {
        module.get_submodule(name).get_parameter(parameter): cut
        for name, layer in layers.items()
        for parameter, cut in layer.slices.items()
    }
    _cut_parameters(module, {whole: _cut_into_dtensor(whole, cut, group) for whole, cut in slices.items()})
    for name, own in numbers.items():
        vars(module.get_submodule(name)).update(own)
    for name, layer in layers.items():
        run_as(module.get_submodule(name), layer, group)
    for name, holder in plan.holders(module).items():
        run_as(module.get_submodule(name), holder, group)
    for name, block in plan.sharded_blocks(module).items():
        _sum_gradients(module.get_submodule(name), name, layers, group)
        run_as(module.get_submodule(name), block, group)
    styles = plan.styles()
    if styles:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh, styles)


def _cut_into_dtensor(whole: nn.Parameter, slices: Slices, group: TensorGroup) -> nn.Parameter:
    """Return a parameter as a DTensor, of which this rank holds its part."""
    from torch.distributed.tensor import DTensor

    own = slices.of(whole.detach(), group.rank, group.size)
    mesh, placements = group.mesh_of(slices.copies), slices.placements()
    cut = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    parameter = nn.Parameter(cut, requires_grad=whole.requires_grad)
    vars(parameter).update(vars(whole))  # what users attach to their parameters
    return parameter


def _cut_parameters(module: nn.Module, cuts: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace whole parameters with cut ones; tied parameters stay tied."""
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in cuts:
                submodule.register_parameter(name, cuts[parameter])


def _sum_gradients(block: nn.Module, name: str, layers: Mapping[str, CutLayer], group: TensorGroup) -> None:
    """Sum the gradients of a block's whole parameters, which are used on shards of the sequence or of features."""
    for own_name, submodule in block.named_modules(prefix=name):
        parent = own_name.rpartition(".")[0]
        is_cut = not isinstance(layers.get(own_name, _WHOLE), WholeLayer) or isinstance(
            layers.get(parent), AttentionCut
        )
        if not is_cut and next(submodule.parameters(recurse=False), None) is not None:
            run_as(submodule, SummedGradients({}), group)


def run_as(submodule: nn.Module, layer: CutLayer, group: TensorGroup, *, replaces: bool = False) -> None:
    """Replace a submodule's forward with that of its cut layer; with `replaces`, instead of another cut layer's."""
    forward: Any = submodule.forward
    if replaces:
        forward = forward.args[-1]
    change_for_good(submodule, {"forward": partial(_cut_forward, submodule, layer, group, forward)})


def _cut_forward(
    submodule: nn.Module, layer: CutLayer, group: TensorGroup, forward: Forward, *args: object, **kwargs: object
) -> object:
    if not layer.computes_loss and asked_of(submodule) is not None:
        raise ModuleError(
            f"the head ({type(submodule).__name__}) is cut as {type(layer).__name__}, which cannot compute a loss "
            "without logits; give it the word 'colwise_gather_output' in tp_plan, or compute the logits."
        )
    return layer.run(submodule, forward, group, args, kwargs)


def check_cut(module: nn.Module, tp: int) -> None:
    """Check that a module which its own ``configure_sharding`` has sharded is cut along ``tp``.

    Raises:
        ConfigError: naming the axes along which it is sharded.
    """
    cut: list[Any] = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    axes = {axis for parameter in cut for axis in parameter.device_mesh.mesh_dim_names}
    if "tp" not in axes:
        raise ConfigError(
            f"{type(module).__name__}.configure_sharding shards along {', '.join(sorted(axes))}, but tp={tp}; let it "
            "cut layers along mesh['tp'] first, or shard nothing there."
        )
