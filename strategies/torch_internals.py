"""Private names of torch, but for fields of its objects, units and pipelines, and the versions that have them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..common.errors import EchelonError

if TYPE_CHECKING:
    from torch._dynamo.callback import CompilationCallbackHandler
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.rpc import TensorPipeRpcBackendOptions
    from torch.distributed.tensor import Placement
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

__all__ = [
    "BatchNorm",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "Dropout",
    "OpOverload",
    "StopRecomputation",
    "TorchDispatchMode",
    "is_profiling",
    "is_traceable_wrapper_subclass",
    "kill_with_parent",
    "tree_leaves",
    "tree_map",
]

SEEN: Final = "2.11.0, 2.14.1 and 2.15.0"
"""The versions of torch that have all these names; `make test-versions` runs the core of the tests on them."""


class _NamesOfTorch:
    """Raises an error that names the supported versions of torch if a private name is gone from this one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ImportError | AttributeError):
            raise EchelonError(
                f"A private name that Echelon needs is missing in torch {torch.__version__} ({error}); Echelon was "
                f"tested with torch {SEEN}: install one of them, or a newer Echelon."
            ) from error


names_of_torch: Final = _NamesOfTorch()

with names_of_torch:
    from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
    from torch.autograd import _profiler_enabled as is_profiling  # type: ignore[attr-defined]
    from torch.multiprocessing import _prctl_pr_set_pdeathsig as kill_with_parent  # type: ignore[attr-defined]
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves, tree_map
    from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

    OpOverload = torch._ops.OpOverload  # noqa: SLF001


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a DTensor that is sharded within each of `split_factor` parts of a dimension."""
    with names_of_torch:
        from torch.distributed.tensor.placement_types import _StridedShard
    return _StridedShard(dim, split_factor=split_factor)


def tell_compiled_shards_apart() -> None:
    """Have torch.compile keep a compiled function on disk for each shape of a DTensor's shard.

    By itself, it looks only at the whole shape and the device: ranks on CPUs, or on nodes that share a cache, whose
    shards are uneven would get each other's functions, which read and write beyond their memory (torch 2.14).
    """
    from torch.distributed.tensor import DTensor

    of_the_whole: Any = getattr(DTensor, "_stable_hash_for_caching", None)  # torch 2.11 has none
    if of_the_whole is None or hasattr(of_the_whole, "knows_shards"):
        return

    def of_the_shard(tensor: Any) -> str:
        shard = tensor._local_tensor  # noqa: SLF001
        return f"{of_the_whole(tensor)} {tuple(shard.shape)} {shard.stride()}"

    of_the_shard.knows_shards = True  # type: ignore[attr-defined]
    DTensor._stable_hash_for_caching = of_the_shard  # type: ignore[assignment, method-assign] # noqa: SLF001


def forget_meshes() -> None:
    """Have the operations of DTensors return none on a mesh that an earlier run of this process has made.

    torch treats two meshes with the same ranks and names as one, whatever they are part of, and remembers what an
    operation returns for them: the result would be on the earlier mesh, whose process groups are gone, and which may
    repeat it over other ranks (torch 2.11 to 2.15).
    """
    with names_of_torch:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    _clear_sharding_prop_cache()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the DeviceMesh that a mesh is part of."""
    with names_of_torch:
        return mesh._get_root_mesh()  # noqa: SLF001


def split_axis(mesh: DeviceMesh, sizes: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Return a DeviceMesh of one axis as one of two axes. Collective: every rank of the process group calls it."""
    with names_of_torch:
        return mesh._unflatten(0, sizes, names)  # noqa: SLF001


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context that disables the TorchDispatchModes around it, such as that of selective checkpointing."""
    with names_of_torch:
        from torch.utils._python_dispatch import _disable_current_modes
    return _disable_current_modes()


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have a shape and no memory; real tensors are treated in the same way."""
    with names_of_torch:
        from torch._subclasses.fake_tensor import FakeTensorMode
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_beside_real() -> FakeTensorMode:
    """Return a `fake_mode` that computes normally if all tensors are real, such as the ranks of a DeviceMesh."""
    with names_of_torch:
        from torch._subclasses.fake_tensor import FakeTensorMode

    class BesideReal(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Any = None) -> object:
            kinds = {type(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            if kinds and kinds <= {torch.Tensor, torch.nn.Parameter}:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return BesideReal(allow_non_fake_inputs=True)


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no memory, like those made in a `fake_mode`."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # without it there are none
    return module is not None and isinstance(tensor, module.FakeTensor)


def real_values() -> AbstractContextManager[object]:
    """Return a context in which new tensors have memory, also inside a `fake_mode`."""
    with names_of_torch:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    return unset_fake_temporarily()


def join_fake_group(rank: int, world_size: int) -> None:
    """Join a process group as one rank, without any other processes; its collectives return at once."""
    import torch.distributed as dist

    with names_of_torch:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # as its documentation has it
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)


def unknown_values() -> tuple[type[Exception], ...]:
    """Return the errors that are raised when code reads the values of a tensor without memory."""
    with names_of_torch:
        from torch._subclasses import fake_tensor as fake

        values = fake.DataDependentOutputException, fake.DynamicOutputShapeException
        return (*values, fake.UnsupportedFakeTensorException, fake.UnsupportedOperatorException)


def function_modes() -> list[TorchFunctionMode]:
    """Return the TorchFunctionModes around the caller, the outermost first."""
    with names_of_torch:
        from torch.overrides import _get_current_function_mode_stack
    return list(_get_current_function_mode_stack())


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the TorchDispatchModes around the caller, the outermost first."""
    with names_of_torch:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    return list(_get_current_dispatch_mode_stack())


def compilation_callbacks() -> CompilationCallbackHandler:
    """Return the registry of functions that torch.compile calls before and after it compiles."""
    with names_of_torch:
        from torch._dynamo.callback import callback_handler
    return callback_handler


def default_store() -> Store:
    """Return the store through which the processes of the default process group met."""
    from torch.distributed import distributed_c10d

    with names_of_torch:
        return distributed_c10d._get_default_store()  # noqa: SLF001


def overflows_of(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[torch.Tensor]:
    """Return, for each device, whether gradients that were unscaled there are not finite; to be changed in place.

    Where there were none, as on a frozen stage of a pipeline, it is one for `device`: torch steps no optimizer of which
    it knows nothing.
    """
    with names_of_torch:
        found: Any = scaler._found_inf_per_device(optimizer)  # noqa: SLF001
    if not found:
        found[device] = torch.zeros((), device=device)
    return list(found.values())


def memory_of(storage: Any) -> torch.UntypedStorage:
    """Return the memory of a storage, which may be of the kind that knows a dtype."""
    with names_of_torch:
        is_untyped = isinstance(storage, torch.UntypedStorage)
        memory: torch.UntypedStorage = storage if is_untyped else storage._untyped_storage  # noqa: SLF001 - to ask itself is deprecated
    return memory


def registered_name() -> str:
    """Return the name of the type of device that another package has registered; ``privateuseone`` if none has."""
    with names_of_torch:
        return str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001


def has_kernel(operation: str, device_type: str) -> bool:
    """Return whether an operation such as ``aten::add.Tensor`` has a kernel of its own for a type of device."""
    with names_of_torch:
        key = torch._C._dispatch_key_for_device(device_type)  # noqa: SLF001
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))  # noqa: SLF001


def is_reduced(wrapper: DistributedDataParallel) -> bool:
    """Return whether DDP has averaged all gradients of a backward, or none; torch 2.11 to 2.14."""
    with names_of_torch:
        check = wrapper.reducer._check_reducer_finalized  # noqa: SLF001
    try:
        check()
    except RuntimeError:
        return False
    return True


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Make DistributedDataParallel ignore these parameters and buffers of a module, which it has yet to wrap."""
    from torch.nn.parallel import DistributedDataParallel

    with names_of_torch:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # noqa: SLF001


def join_rpc(name: str, rank: int, world_size: int, store: Store, options: TensorPipeRpcBackendOptions) -> None:
    """Do what ``torch.distributed.rpc.init_rpc`` does, but over the caller's store.

    torch prefixes the keys of its store with the number of calls in this process, which can differ between peers.
    """
    from torch.distributed import autograd, rpc

    with names_of_torch:
        autograd._init(rank)  # type: ignore[attr-defined] # noqa: SLF001
        rpc._init_rpc_backend(store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options)  # noqa: SLF001


def rpc_options(timeout: float) -> TensorPipeRpcBackendOptions:
    """Return options of RPC that sends over sockets only.

    With shared memory, a thread of each process would poll for messages all the time, on a core of its own.
    """
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"])


def is_rpc_initialized() -> bool:
    """Return whether this process has joined RPC already."""
    from torch.distributed import rpc

    with names_of_torch:
        return bool(rpc.api._is_current_rpc_agent_set())  # type: ignore[attr-defined] # noqa: SLF001


def processes_of(context: Any) -> list[object]:
    """Return the processes that an agent of torch's elastic has started, for their exit codes."""
    with names_of_torch:
        return list(context._pc.processes)  # noqa: SLF001


def file_writer_of(summary_writer: Any) -> Any:
    """Return what writes the events of a SummaryWriter to its file."""
    with names_of_torch:
        write = summary_writer._get_file_writer  # noqa: SLF001
    return write()


# --- settings --------------------------------------------------------------------------------------------------------

_PRECISION_OF: Final = (
    ("generic", ("all",)),
    ("cuda", ("all", "matmul", "conv", "rnn")),
    ("mkldnn", ("all", "matmul", "conv", "rnn")),
)
_COMPILER: Final = ("torch._dynamo.config", "torch._inductor.config")


def float32_precisions() -> dict[tuple[str, str], str]:
    """Return the precision of float32 computation, by backend and operation (torch >= 2.9)."""
    return {(backend, op): _precision("get")(backend, op) for backend, ops in _PRECISION_OF for op in ops}


def set_float32_precisions(precisions: dict[tuple[str, str], str]) -> None:
    """Set only the precisions that differ; the others stay at their defaults."""
    for place, precision in precisions.items():
        if _precision("get")(*place) != precision:
            _precision("set")(*place, precision)


def _precision(verb: str) -> Callable[..., str]:
    with names_of_torch:
        function: Callable[..., str] = getattr(torch._C, f"_{verb}_fp32_precision_{verb}ter")  # noqa: SLF001
    return function


def compiler_settings() -> dict[tuple[str, str], object]:
    """Return the torch.compile settings that the program has changed, by module and name; plain values only."""
    changed = {}
    for name in _COMPILER:
        config: Any = sys.modules.get(name)  # importing it takes a second, and if not imported, it is unchanged
        for key in _changed(config) if config is not None else ():
            if _is_plain(value := getattr(config, key)):
                changed[name, key] = value
    return changed


def _changed(config: Any) -> Iterable[str]:
    with names_of_torch:
        return [key for key in config._config if not config._is_default(key)]  # noqa: SLF001


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, bool | int | float | str)


def group_named(name: str) -> ProcessGroup | None:
    """Return the process group with a name; None if there is none."""
    with names_of_torch:
        from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is inside of a transformation of ``torch.func``."""
    with names_of_torch:
        return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001


def outside_transformations() -> AbstractContextManager[object]:
    """Return a context outside of the transformations of ``torch.func`` around it, for what is not transformed."""
    with names_of_torch:
        is_inside = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
        return torch._C._DisableFuncTorch() if is_inside else nullcontext()  # noqa: SLF001


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    with names_of_torch:
        return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def set_dtensor_handler(operation: OpOverload, handler: Callable[..., object]) -> None:
    """Let DTensors compute an operation by calling ``handler(operation, args, kwargs)``."""
    with names_of_torch:
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher._custom_op_handlers[operation] = handler  # noqa: SLF001
