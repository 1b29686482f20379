"""Private fields of torch's tensors, modules, operators, optimizers and workers, each read or changed by one function.

All were seen in the versions that `torch_internals.SEEN` names: 2.11.0, 2.14.1 and 2.15.0. The functions are plain
accesses, without `names_of_torch`, as many run in each step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T", bound=Tensor)
M = TypeVar("M", bound=nn.Module)
_PACKAGE: Final = __name__.partition(".")[0]
_MEAN: Final = 1
"""The number of ``reduction="mean"`` in torch's C++ (`torch.nn._reduction`)."""

# --- tensors ---------------------------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place (`_version`); 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def memory_id(held: Tensor | torch.UntypedStorage) -> int:
    """Return the address of a storage (`_cdata`), or of a tensor's, which also one without memory has."""
    storage: torch.UntypedStorage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)  # noqa: SLF001


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that one is a view of (`_base`); itself if it is none."""
    base: Tensor | None = tensor._base  # noqa: SLF001
    return tensor if base is None else base


def takes_data_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether one tensor can take another's data (`torch._has_compatible_shallow_copy_type`)."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, other))  # noqa: SLF001


def with_shard_elsewhere(dtensor: DTensor, shard: Tensor) -> DTensor:
    """Return a DTensor with the layout of one (`_spec`) and a shard that need not be on the mesh's type of device."""
    return type(dtensor)(shard, dtensor._spec, requires_grad=False)  # noqa: SLF001


def read_by_placements(dtensor: DTensor) -> None:
    """Have a DTensor on a one-axis mesh gathered by its placement (`_spec`), where torch 2.11 looks for a shard order.

    A packed tensor has none, and torch would raise.
    """
    spec = dtensor._spec  # noqa: SLF001
    order = spec.compute_default_shard_order(spec.placements)
    spec.use_strided_shard_as_shard_order, spec.shard_order = False, order


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view of another one (`_is_view`)."""
    return tensor._is_view()  # noqa: SLF001


def same_without_view(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and shape that autograd takes for no view (`aten::_unsafe_view`)."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)  # noqa: SLF001
    return result


def values_of(tensor: Tensor) -> Tensor:
    """Return what a tensor holds, to be changed in place: the values of a sparse one (`_values`), or itself."""
    return tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001


def components_of(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor (`_indices`, `_values`), which may be not coalesced."""
    return sparse._indices(), sparse._values()  # noqa: SLF001


def norms_of(tensors: list[Tensor], order: float = 2.0) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, computed together (`torch._foreach_norm`)."""
    return torch._foreach_norm(tensors, ord=order)  # noqa: SLF001


def as_instance(kind: type[T], tensor: Tensor) -> T:
    """Return a tensor of a subclass with the same memory, as torch makes parameters (`Tensor._make_subclass`)."""
    made: T = torch.Tensor._make_subclass(kind, tensor)  # noqa: SLF001
    return made


# --- modules ---------------------------------------------------------------------------------------------------------


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module keeps its own parameters (`_parameters`), to be read or changed."""
    return module._parameters  # noqa: SLF001


def buffers_by_name(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module keeps its own buffers (`_buffers`), to be read or changed."""
    return module._buffers  # noqa: SLF001


def children_by_name(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary in which a module keeps its children (`_modules`), to be read or changed."""
    return module._modules  # noqa: SLF001


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a module's buffer is in its state dict (`_non_persistent_buffers_set` has the others)."""
    return name not in module._non_persistent_buffers_set  # noqa: SLF001


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors of a module and of its submodules, and their gradients (`_apply`, which ``to`` calls)."""
    module._apply(change)  # noqa: SLF001


def apply_to_own_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's own tensors, not those of its children (`_apply`); all of a metric of torchmetrics."""
    apply: Any = module._apply  # noqa: SLF001
    apply(change, **({"recurse": False} if "recurse" in inspect.signature(apply).parameters else {}))


def copy_without_parameters(module: M) -> M:
    """Return a shallow copy of a module, with dictionaries of its own (`_replicate_for_data_parallel`)."""
    replicate: Any = module._replicate_for_data_parallel  # noqa: SLF001
    copied: M = replicate()
    return copied


def compiled_call_of(module: nn.Module) -> Callable[..., object] | None:
    """Return what runs in place of a module's call, as ``module.compile()`` sets it (`_compiled_call_impl`)."""
    return vars(module).get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., object]) -> None:
    """Let a function run in place of a module's call, before its hooks (`_compiled_call_impl`)."""
    module._compiled_call_impl = call  # noqa: SLF001


def drop_compiled_call(module: nn.Module) -> None:
    """Let a module's call run as it is written (`_compiled_call_impl`)."""
    vars(module).pop("_compiled_call_impl", None)


def call_uncompiled(module: nn.Module, /, *args: object, **kwargs: object) -> Any:
    """Call a module, with its hooks, whatever was set in place of its call (`_call_impl`)."""
    return module._call_impl(*args, **kwargs)  # noqa: SLF001


def compiled_from(module: Any) -> nn.Module | None:
    """Return the module inside of ``torch.compile(module)`` (`_orig_mod`); None if it is another one.

    To check its class, torch._dynamo would be imported, which takes a second.
    """
    inner: nn.Module | None = getattr(module, "_orig_mod", None)
    return inner


# --- operators -------------------------------------------------------------------------------------------------------


def arguments_of(operator: Any) -> Sequence[Any]:
    """Return the arguments that an operator takes, with their names and whether it writes them (`_schema`)."""
    arguments: Sequence[object] = operator._schema.arguments  # noqa: SLF001
    return arguments


def schema_name(operator: Any) -> str:
    """Return the name that the overloads of an operator share, such as ``aten::fill_`` (`_schema`)."""
    return str(operator._schema.name)  # noqa: SLF001


# --- optimizers ------------------------------------------------------------------------------------------------------

_STEP: Final = ("step", "_step_supports_amp_scaling")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a user has given an optimizer hooks (`_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`).

    Those of this package take times on some ranks, and read no parameters.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())  # noqa: SLF001
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] != _PACKAGE for hook in hooks)


def step_hooks(optimizer: Optimizer) -> list[object]:
    """Return the dictionaries of hooks before and after a step: an optimizer's, then those of all optimizers.

    They are `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, and with `_global_optimizer` in the module of
    torch; None for one that is missing.
    """
    own, of_all = vars(optimizer), vars(sys.modules[Optimizer.__module__])
    hooks = [own.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    return hooks + [of_all.get(f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]


def note_step(optimizer: Optimizer) -> None:
    """Note that an optimizer was stepped, or else schedulers warn that it was not (`_opt_called`)."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def has_noted_step(optimizer: Optimizer, step: Any) -> bool:
    """Return whether a step is what a scheduler put there to note one (`_wrapped_by_lr_sched`), and has done so."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False) and getattr(optimizer, "_opt_called", False))


def takes_scaled_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step unscales gradients and looks for overflows (`_step_supports_amp_scaling`)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def replace_step(optimizer: Optimizer, step: Any) -> dict[str, object]:
    """Set the step of an optimizer, which takes unscaled gradients; return what it replaces, for `put_step_back`.

    Schedulers made later do not wrap it (`_wrapped_by_lr_sched`).
    """
    own = vars(optimizer)
    replaced: dict[str, object] = {name: own[name] for name in _STEP if name in own}
    step._wrapped_by_lr_sched = True  # noqa: SLF001
    own.update(step=step, _step_supports_amp_scaling=False)
    return replaced


def put_step_back(optimizer: Optimizer, replaced: Mapping[str, object]) -> None:
    """Undo a `replace_step`."""
    own = vars(optimizer)
    for name in _STEP:
        own.pop(name, None)
    own.update(replaced)


def zero_class() -> Any:
    """Return torch's ZeroRedundancyOptimizer, for parameters of any dtypes.

    torch's own requires one (`_verify_same_dense_param_type`), for buckets, which are not used here.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class OfAnyDtypes(ZeroRedundancyOptimizer):
        def _verify_same_dense_param_type(self) -> None:
            pass

    return OfAnyDtypes


def owners_of(zero: Any) -> Mapping[Tensor, int]:
    """Return the rank to which a ZeroRedundancyOptimizer assigns each parameter (`_param_to_rank`)."""
    owners: Mapping[Tensor, int] = zero._param_to_rank  # noqa: SLF001
    return owners


def step_own_part(zero: Any, closure: Callable[[], object] | None) -> object:
    """Update the parameters that a ZeroRedundancyOptimizer assigns to this rank (`_local_step`), and send none.

    torch's ``step`` would send one at a time. It warns of each change of what is trained, as of buckets, unless that
    is up to date (`_is_trainable_mask`).
    """
    zero._is_trainable_mask = zero._get_is_trainable_mask()  # noqa: SLF001
    return zero._local_step(closure=closure)  # noqa: SLF001


# --- the autograd graph ----------------------------------------------------------------------------------------------


def counts_of_mean(node: Any) -> tuple[Tensor, int] | None:
    """Return what a cross-entropy was divided by, and its number of targets (`_saved_total_weight`, `_saved_target`).

    None for a sum (`_saved_reduction`), and where reading would compute the forward again, in a checkpoint.
    """
    if node._saved_reduction != _MEAN:  # noqa: SLF001
        return None
    hook = node._raw_saved_target.unpack_hook  # noqa: SLF001
    if hook is not None and hook.__module__ == "torch.utils.checkpoint":
        return None
    total, target = node._saved_total_weight, node._saved_target  # noqa: SLF001
    if total.dtype.itemsize < 4:  # not every whole number is one of these
        ignored = node._saved_ignore_index  # noqa: SLF001
        counts = target != (ignored - 2**64 if ignored >= 2**63 else ignored)
        weight = node._saved_weight  # noqa: SLF001
        total = counts.sum() if weight is None else (weight.double()[target.where(counts, 0)] * counts).sum()
    return total, target.numel()


def adds_as_it_is(node: Any) -> bool:
    """Return whether a sum adds its second operand without a factor (`_saved_alpha`), and does not subtract it."""
    return type(node).__name__ == "AddBackward0" and node._saved_alpha == 1  # noqa: SLF001


def is_of_one_element(node: Any) -> bool:
    """Return whether a sum or mean had a single element to reduce (`_saved_self_sym_sizes`)."""
    return all(size == 1 for size in node._saved_self_sym_sizes)  # noqa: SLF001


def has_compiled() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process (`torch._dynamo.utils.counters`)."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"])


def notes_of(node: Any) -> dict[str, Any]:
    """Return the notes that an operation of a graph carries (`metadata`), which live as long as it."""
    notes: dict[str, object] = node.metadata
    return notes


def reads_by_itself(module: nn.Module) -> bool:
    """Return whether a module has code of its own that reads entries of a state dict."""
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001
        or kind.set_extra_state is not nn.Module.set_extra_state
        or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001
    )


def hide_worker_info() -> None:
    """Let ``get_worker_info()`` return None from now on in this worker process, for a data set that another divides."""
    from torch.utils.data._utils import worker

    worker._worker_info = None  # noqa: SLF001


def has_workers(iterator: object) -> bool:
    """Return whether an iterator is that of a DataLoader with worker processes."""
    return hasattr(iterator, "_shutdown_workers")


def end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator."""
    iterator._shutdown_workers()  # noqa: SLF001
