"""Profiling of a module: the trainer runs one step of it, on tensors without memory or on real ones."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.run import Run
from ...common.errors import EchelonError, ModuleError
from ...strategies import Hardware, Precision, Strategy
from ...strategies.cluster.launchers import detect_environment
from ...strategies.distributed.nested import iterate_tensors, map_tensors
from ...strategies.estimate.live_memory import LiveMemory, storages_bytes
from ...strategies.estimate.profile import Profile, StateBytes
from ...strategies.experts.without_values import even_experts
from ...strategies.launch.signal_handlers import end_handling
from ...strategies.module.deferred_init import without_trunc_normal
from ...strategies.module.loss_scaling import LossScaling
from ...strategies.parallel.batch_split import split_batch
from ...strategies.placed.placed import ClipAlgorithm, Placed, Site
from ...strategies.torch_internals.fake_tensors import find_value_errors, is_without_memory, make_fake_mode
from ...strategies.torch_internals.modules import find_buffer_dict, find_parameter_dict
from ..data.seed import capture_rng, restore_rng
from ..module.train_module import TrainModule

if TYPE_CHECKING:
    from ...strategies.torch_internals.fake_tensors import FakeTensorMode

_PACKAGE: Final = Path(__file__).parents[2]
_WITHOUT_MEMORY: Final = re.compile(
    r"fake ?tensor|\bmeta\b|data_ptr|data is not allocated|tensor\.item\(\)|tensor subclasses", re.IGNORECASE
)
"""What the errors say that torch raises of tensors without memory, beside those of `find_value_errors`."""

Fit = Callable[["ProfilingStrategy", Callback], None]
"""Trains the module for a single step, with this strategy and this callback."""


class ProfilingStrategy(Strategy):
    """Train one step in this process and measure what it needs; by default on tensors without memory.

    Such tensors (torch's FakeTensors) have a shape, a dtype and no values. The parameters of the module are replaced by
    such tensors, for good.

    Args:
        num_samples: the size of the micro-batch, cut from the loader's; None for the loader's whole batch.
        measures: whether to run the step on real tensors, for a module that needs values.
        mode: the mode in which the module was built without memory, if it was.
        updates: whether to step the optimizers, whose state depends on neither the micro-batch nor what is recomputed.
    """

    name: ClassVar[str] = "profile"

    def __init__(
        self,
        *,
        num_samples: int | None = None,
        measures: bool = False,
        mode: FakeTensorMode | None = None,
        updates: bool = True,
    ) -> None:
        super().__init__()
        self._num_samples, self._updates = num_samples, updates
        self.mode = None if measures else mode or make_fake_mode()
        """The mode in which tensors have no memory; None if tensors are real."""
        self._profiled: ProfiledModule | None = None

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        # on its own, even in a process that a launcher started
        super().validate(replace(hardware, num_nodes=1, environment=detect_environment({})), precision)

    def init_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self.mode is None else build_without_memory(self.mode)

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        if self.mode is None:
            self.precision.convert_module(module, self.device)
        else:
            without_memory(module, self.mode, self.precision.param_dtype)
        self._profiled = ProfiledModule(
            self.site,
            module,
            mode=self.mode,
            num_samples=self._num_samples,
            updates=self._updates,
            is_manual=is_manual,
        )
        return self._profiled

    def profile(self, optimizers: Sequence[Optimizer]) -> Profile:
        """Return the profile of the step that was run."""
        assert self._profiled is not None
        return self._profiled.profile(optimizers)


class ProfiledModule(Placed):
    """A module on one device, or without memory, of whose step is measured what it needs.

    Args:
        site: where it lies.
        module: the module.
        mode: the mode in which tensors have no memory; None if they are real.
        num_samples: the size of the micro-batch; None for the whole batch.
        updates: whether to step the optimizers.
        is_manual: whether the step itself computes gradients and updates.
    """

    def __init__(
        self,
        site: Site,
        module: nn.Module,
        *,
        mode: FakeTensorMode | None,
        num_samples: int | None,
        updates: bool,
        is_manual: bool,
    ) -> None:
        super().__init__(replace(site, scaling=LossScaling.disabled(site.device)), module)
        self._mode, self._num_samples, self._updates, self._is_manual = mode, num_samples, updates, is_manual
        self._memory = LiveMemory(module)
        self._update_bytes = 0
        self._size = self._num_backwards = 0

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self._mode is not None:
            for optimizer in optimizers:
                keep_counts(optimizer, self._mode)

    def _run(self, step_name: str, *args: object) -> Any:
        batch, *rest = args
        batch = self._cut(batch)
        if self._mode is not None:
            batch = map_tensors(self._mode.from_tensor, batch)
        with self._watched() as memory, self.forward_context:
            memory.take(batch)
            return getattr(self.module, step_name)(batch, *rest)

    def step_fn(self, step_name: str) -> Callable[..., object]:
        return partial(self._run, step_name)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        self._num_backwards += 1
        with self._watched() as memory:
            memory.begin_backward()
            loss.backward(*args, **kwargs)
            memory.end_backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Leave the gradients as they are: whether they overflow depends on values."""

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        return super().clip(optimizer, limit, algorithm) if self._updates else None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:  # the forward and backward of this step are no part of its update
            first, evaluate = [closure()], closure
            closure = lambda: first.pop() if first else evaluate()  # noqa: E731
        if not self._updates:
            return
        self._memory.begin_update()
        before = self._memory.num_bytes
        with self._watched() as memory:
            optimizer.step(closure)
        state = list(iterate_tensors(list(optimizer.state.values())))
        self._update_bytes = max(self._update_bytes, memory.most - before - storages_bytes(state))
        memory.end_update(state)

    def end_step(self) -> bool:
        return True

    @contextmanager
    def _watched(self) -> Iterator[LiveMemory]:
        without_values = nullcontext() if self._mode is None else even_experts(self.module)
        with _tensor_context(self._mode), without_values, self._memory.watching(), self._memory:
            yield self._memory

    def _cut(self, batch: object) -> object:
        size = next((len(tensor) for tensor in iterate_tensors(batch) if tensor.dim()), 1)
        if self._num_samples is not None and self._num_samples < size:
            slices, sizes = split_batch(batch, -(-size // self._num_samples))
            batch, size = slices[0], sizes[0]
        self._size = size
        return batch

    def profile(self, optimizers: Sequence[Optimizer]) -> Profile:
        """Return the profile of the step that was run."""
        module, memory = self.module, self._memory
        state: dict[Any, StateBytes] = {
            parameter: _state_bytes(values) for optimizer in optimizers for parameter, values in optimizer.state.items()
        }
        gradients = {parameter: parameter.grad for parameter in module.parameters() if parameter.grad is not None}
        return Profile(
            module=module,
            precision=self.precision,
            num_samples=self._size,
            trained=frozenset(gradients),
            unused=frozenset(p for p in module.parameters() if p.requires_grad and p not in gradients),
            sparse={p: memory.sparse_bytes(p) for p, gradient in gradients.items() if gradient.is_sparse},
            is_manual=self._is_manual,
            num_backwards=max(1, self._num_backwards),
            optimizers=tuple(optimizers),
            state=state,
            update_bytes=max(0, self._update_bytes),
            buffer_bytes=storages_bytes(module.buffers()),
            memory=memory.result(),
            layers=dict(memory.layers),
            attention_bytes=memory.attention_bytes,
            attention_bytes_again=memory.attention_bytes_again,
            largest_attention_bytes=memory.largest_attention_bytes,
            flops=memory.flops,
            work=memory.work,
            work_of_update=memory.work_of_update,
        )


class _FirstStep(Callback):
    """Takes the profile after the first step and ends training."""

    def __init__(self, strategy: ProfilingStrategy) -> None:
        self._strategy = strategy
        self.profile: Profile | None = None

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        end_handling()  # the step may take minutes, and has nothing to save

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        self.profile = self._strategy.profile(trainer.optimizers)
        trainer.should_stop = True


def take_profile(fit: Fit, module: TrainModule, strategy: ProfilingStrategy) -> Profile:
    """Return the profile of one step of a module, through the trainer's own loop.

    The states of random generators are restored afterwards.

    Args:
        fit: trains the module.
        module: gets parameters without memory for good, unless the strategy measures.
        strategy: runs the step.

    Raises:
        ModuleError: naming the line that needs values, and for a step that computes no gradients.
    """
    first = _FirstStep(strategy)
    rng = capture_rng()
    vars(module)["configure_callbacks"] = list  # the module's own callbacks would report on a mock step
    try:
        fit(strategy, first)
    except Exception as error:
        if strategy.mode is None or not lacks_values(error):
            raise
        raise needs_values(type(module).__name__, error) from error
    finally:
        del vars(module)["configure_callbacks"]
        restore_rng(rng)
    name, profile = type(module).__name__, first.profile
    if profile is None:
        raise ModuleError(
            f"{name} took no step to profile: its training loader has no batch; give it one batch or more, and allow a "
            "step by max_steps and max_epochs."
        )
    if not profile.trained and any(parameter.requires_grad for parameter in profile.parameters):
        raise ModuleError(
            f"{name} took a step in which no parameter got a gradient, so that there is nothing to plan; return the "
            "loss of the first batch, or call manual_backward on it."
        )
    return profile


def lacks_values(error: Exception) -> bool:
    """Return whether an error is that of a tensor without memory that was asked for its values."""
    if isinstance(error, find_value_errors()):
        return True
    is_of_torch = isinstance(error, RuntimeError | TypeError) and not isinstance(error, EchelonError)
    return is_of_torch and _WITHOUT_MEMORY.search(str(error)) is not None


def needs_values(
    name: str, error: Exception, remedy: str = "measure one real micro-batch with --measure"
) -> ModuleError:
    """Return the error that says where a module of this name has asked a tensor without memory for its values."""
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = Path(torch.__file__).parent
    own = [f for f in frames if not {_PACKAGE, torch_folder} & {*Path(f.filename).parents} or "examples" in f.filename]
    own = own or [frame for frame in frames if torch_folder / "optim" in Path(frame.filename).parents]
    where = f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else "the step"
    return ModuleError(
        f"{name} needs the values of a tensor at {where}, but a tensor without memory has none "
        f"({type(error).__name__}); {remedy}."
    )


@contextmanager
def build_without_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Build modules inside without memory; ``nn.init.trunc_normal_``, which draws until values fit, is left out."""
    with mode, without_trunc_normal():
        yield


def keep_counts(optimizer: Optimizer, mode: FakeTensorMode) -> None:
    """Replace counts of steps that an optimizer has from its beginning by such whose value stays known in the mode."""
    for values in optimizer.state.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.dim() and not is_without_memory(value):
                number = value.item()
                with mode:
                    values[name] = torch.tensor(number, dtype=value.dtype)


def without_memory(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Replace the parameters and buffers of a module by tensors without memory; tied ones stay one tensor."""
    made: dict[Tensor, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if getattr(tensor, "fake_mode", None) is mode and tensor.dtype is new_dtype:
            return tensor
        if tensor not in made:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype)
            made[tensor] = empty
            if isinstance(tensor, nn.Parameter):
                made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                vars(made[tensor]).update(vars(tensor))  # what users attach to their parameters
        return made[tensor]

    # in place, under the same names
    for submodule in module.modules():
        held: Any
        for held in (find_parameter_dict(submodule), find_buffer_dict(submodule)):
            held.update({name: replacement(tensor) for name, tensor in held.items() if tensor is not None})


def _tensor_context(mode: FakeTensorMode | None) -> AbstractContextManager[object]:
    """Return the context in which tensors have no memory; empty if they are real."""
    return nullcontext() if mode is None else mode


def _state_bytes(values: dict[str, object]) -> StateBytes:
    tensors = list(iterate_tensors(values))
    scalars = sum(tensor.nbytes for tensor in tensors if not tensor.dim())
    return StateBytes(sum(tensor.nbytes for tensor in tensors) - scalars, scalars)
