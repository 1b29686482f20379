"""LiveMemory: counts the memory of the tensors that are alive while a step runs, and what they come from."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors
from ..module.blocks import repeated_blocks
from ..module.memory_estimate import size_of
from ..state.dtensor import local_shard
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.operators import TorchDispatchMode, tree_leaves
from ..torch_internals.tensors import read_components, read_memory_id
from .profile import CASTS, LayerUse, Sources, StepMemory
from .step_work import ATTENTION, StepWork, work_of
from .unknown_sizes import sparse_gradient, with_workspace

_NOTHING: Final[Sources] = frozenset()
_CAST: Final = "aten::_to_copy"


class LiveMemory(TorchDispatchMode):
    """Intercepts every operation inside, and so sees every new storage; a weak reference tells when one is freed.

    The module's own tensors do not count. A tensor made inside a layer with parameters comes from this layer; any other
    one comes, in forward, from the layers of its inputs, and in backward from none. The idea is that of torch's
    (private) MemTracker.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        # FlopCounterMode itself keeps the graph alive, and with it recomputed tensors
        self._flops_of: dict[Any, Any] = flop_registry
        self.flops = 0
        self.work = self.work_of_update = StepWork()
        self._module = module
        own = [*module.parameters(), *module.buffers()]
        self._own = {_id_of_memory(tensor) for tensor in own}
        self._parameters = {_id_of_memory(tensor) for tensor in module.parameters()}
        self._alive: dict[int, tuple[int, Sources, str]] = {}
        self._references: dict[int, object] = {}
        self._gradients: dict[int, int] = {}
        self._sparse: dict[torch.Size, list[int]] = defaultdict(list)
        """The bytes of the sparse gradients of each shape."""
        self._by_source: Counter[Sources] = Counter()
        self._now = self._most = self._most_before = self._now_gradients = self._most_with_gradients = 0
        self._is_unseen = False
        """Whether `_peak` must still be taken from what is alive now."""
        self._peak: Mapping[Sources, int] = {}
        self._kept: Mapping[Sources, int] = {}
        self._kept_blocks: Mapping[str, int] = {}
        self._inside: list[str] = []
        self._blocks: list[str] = []
        self._is_backward = self._is_update = False
        self.layers: dict[str, LayerUse] = {}
        """How each layer with parameters was called."""
        self.attention_bytes = self.attention_bytes_again = self.largest_attention_bytes = 0

    # --- what is asked when the step has run -------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """The bytes alive now, without gradients."""
        return self._now

    @property
    def most(self) -> int:
        """The most bytes alive at once, without gradients, in this part of the step."""
        return self._most

    def result(self) -> StepMemory:
        """Return the memory that the micro-batch needed."""
        self._take_peak()
        return StepMemory(
            kept=dict(self._kept),
            peak=dict(self._peak),
            most_with_gradients=self._most_with_gradients,
            blocks=dict(self._kept_blocks),
        )

    def begin_update(self) -> None:
        """Note that the gradients are complete; from here on `most` is that of the update."""
        self._take_peak()
        self._is_update, self._most_before, self._most = True, self._most, self._now

    def end_update(self, state: Iterable[Tensor]) -> None:
        """Note that the optimizer's step, which may be followed by another forward, has left this state."""
        self._is_update, self._most = False, self._most_before
        for part in (part for tensor in state for part in _tensors_with_memory(tensor)):
            memory = _id_of_memory(part)
            if memory in self._alive:
                self._forget(memory)
                self._own.add(memory)

    def sparse_bytes(self, parameter: nn.Parameter) -> float:
        """Return the bytes of the sparse gradient of a parameter."""
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return 0.0
        if not is_without_memory(gradient):
            return size_of(gradient)
        # tables of one shape are not told apart; they have the same share of the rows
        alike = [p for p in self._module.parameters() if p.shape == parameter.shape and p.grad is not None]
        return sum(self._sparse[parameter.shape]) / sum(p.grad.is_sparse for p in alike)  # type: ignore[union-attr]

    # --- what the step tells -----------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the layers, the blocks and the gradients of the module."""
        with ExitStack() as stack:
            handles: list[Any] = []
            stack.callback(lambda: [handle.remove() for handle in handles])
            for name, layer in self._module.named_modules():
                if name and next(layer.parameters(recurse=False), None) is not None:
                    handles.append(layer.register_forward_pre_hook(partial(self._enter, name)))
                    handles.append(layer.register_forward_hook(partial(self._leave, name), always_call=True))
            for name, block in repeated_blocks(self._module):
                handles.append(block.register_forward_pre_hook(lambda *_, name=name: self._blocks.append(name)))
                handles.append(block.register_forward_hook(lambda *_: self._blocks.pop() and None, always_call=True))
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            handles += [parameter.register_post_accumulate_grad_hook(self._take_gradient) for parameter in trained]
            yield

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Note storages that are freed and allocated again, such as those of parameters that ``fully_shard`` gathers.

        No torch operation shows this.
        """
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> object:
            answer = plain(storage, size)
            memory = read_memory_id(storage)
            if memory in self._alive:
                before, sources, block = self._alive[memory]
                self._take_peak()
                self._alive[memory] = size, sources, block
                self._by_source[sources] += size - before
                self._add(size - before, 0)
            return answer

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def take(self, tensors: object) -> None:
        """Count tensors that were created outside, such as a batch."""
        for tensor in iterate_tensors(tensors):
            self._note(tensor, _NOTHING)

    def begin_backward(self) -> None:
        """Note that forward has ended: what is alive now is kept for backward."""
        if sum(self._kept.values()) < self._now:
            self._kept = dict(self._by_source)
            blocks: Counter[str] = Counter()
            for size, _, block in self._alive.values():
                blocks[block] += size
            self._kept_blocks = blocks
        self._is_backward = True

    def end_backward(self) -> None:
        """Note that backward has ended."""
        self._is_backward = False

    # --- what the dispatcher tells -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query, for a device for instance; more than half of all calls here
            return output
        count = self._flops_of.get(getattr(func, "overloadpacket", None))
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=output)
        name = func.name().partition(".")[0]
        if name.startswith(ATTENTION):
            flops += self._note_attention(name, args)
        self.flops += flops
        work = work_of(func, flops, args, kwargs, output)
        if self._is_update:
            self.work_of_update += work
        else:
            self.work += work
        output = with_workspace(name, args, output)
        sparse = sparse_gradient(name, args, output)
        if sparse is not None:
            self._sparse[sparse[0]].append(sparse[1])
        sources = self._sources(name, args)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note(tensor, sources)
        return output

    def _note_attention(self, name: str, args: Any) -> int:
        """Note the keys and values of an attention; return its FLOPs, if torch does not count them."""
        from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

        is_backward, is_cpu = "backward" in name, "_for_cpu" in name
        flops = 0
        if is_cpu:  # torch (2.14) itself counts only those of GPUs
            shapes = [tensor.shape for tensor in args if isinstance(tensor, Tensor)]
            flops = sdpa_backward_flop_count(*shapes[:4]) if is_backward else sdpa_flop_count(*shapes[:3])
        if is_backward:
            return flops
        size = sum(tensor.nbytes for tensor in args[1:3])
        self.attention_bytes += 0 if self._is_backward else size
        self.attention_bytes_again += size if self._is_backward else 0
        self.largest_attention_bytes = max(self.largest_attention_bytes, size)
        return flops

    def _sources(self, operator: str, args: object) -> Sources:
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        if operator == _CAST and tensors and _id_of_memory(tensors[0]) in self._parameters:
            return frozenset((CASTS,))
        if self._inside:
            return frozenset(self._inside[-1:])
        if self._is_backward:
            return _NOTHING
        return _NOTHING.union(*(self._sources_of(tensor) for tensor in tensors))

    def _sources_of(self, tensor: Tensor) -> Sources:
        known = self._alive.get(_id_of_memory(tensor))
        return _NOTHING if known is None else known[1] - {CASTS}

    def _note(self, tensor: Tensor, sources: Sources) -> None:
        for part in _tensors_with_memory(tensor):
            self._note_storage(part.untyped_storage(), sources)

    def _note_storage(self, storage: torch.UntypedStorage, sources: Sources) -> None:
        memory = read_memory_id(storage)
        if memory in self._alive or memory in self._own or memory in self._gradients:
            return
        size = storage.nbytes()
        self._alive[memory] = size, sources, self._blocks[-1] if self._blocks else ""
        self._references[memory] = weakref.ref(storage, lambda _: self._forget(memory))
        self._by_source[sources] += size
        self._add(size, 0)

    def _forget(self, memory: int) -> None:
        self._references.pop(memory, None)
        gradient = self._gradients.pop(memory, None)
        if gradient is not None:
            self._now_gradients -= gradient
            return
        size, sources, _ = self._alive.pop(memory)
        self._take_peak()
        self._by_source[sources] -= size
        self._now -= size

    def _take_gradient(self, parameter: Tensor) -> None:
        for part in () if parameter.grad is None else _tensors_with_memory(parameter.grad):
            self._take_memory(_id_of_memory(part))

    def _take_memory(self, memory: int) -> None:
        if memory in self._alive:
            size, sources, _ = self._alive.pop(memory)
            self._take_peak()
            self._by_source[sources] -= size
            self._now -= size
            self._gradients[memory] = size
            self._now_gradients += size

    def _add(self, size: int, gradients: int) -> None:
        self._now += size
        self._now_gradients += gradients
        if not self._is_update:
            self._most_with_gradients = max(self._most_with_gradients, self._now + self._now_gradients)
        if self._now > self._most:
            self._most, self._is_unseen = self._now, not self._is_update

    def _take_peak(self) -> None:
        if self._is_unseen:
            self._peak, self._is_unseen = dict(self._by_source), False

    # --- layers ------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, layer: nn.Module, inputs: object) -> None:
        self._inside.append(name)

    def _leave(self, name: str, layer: nn.Module, inputs: object, output: object) -> None:
        self._inside.pop()
        outputs = list(iterate_tensors(output))
        if not outputs:  # recomputation stops inside the last layer, as soon as it has all that it needs
            return
        tensors = list(iterate_tensors(inputs))
        before = self.layers.get(name)
        self.layers[name] = LayerUse(
            input_bytes=tensors[0].nbytes if tensors else 0,
            output_bytes=sum(tensor.nbytes for tensor in outputs),
            num_calls=1 if before is None else before.num_calls + 1,
            has_input_gradient=any(tensor.requires_grad for tensor in tensors),
            sources=_NOTHING.union(*(self._sources_of(tensor) for tensor in tensors)),
        )


def storages_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage counted once."""
    parts = [part for tensor in tensors for part in _tensors_with_memory(tensor)]
    return sum({_id_of_memory(part): part.untyped_storage().nbytes() for part in parts}.values())


def _tensors_with_memory(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that hold a tensor's memory: its shard, or the two components of a sparse one."""
    shard = local_shard(tensor)
    return read_components(shard) if shard.is_sparse else (shard,)


def _id_of_memory(tensor: Tensor) -> int:
    return read_memory_id(_tensors_with_memory(tensor)[0])
