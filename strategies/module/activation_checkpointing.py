"""Activation checkpointing: submodules keep less for backward, which recomputes or fetches the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, did_you_mean
from ..torch_internals.modules import find_buffer_dict
from ..torch_internals.operators import list_arguments, list_function_modes
from ..torch_internals.tensors import read_version
from .activation_offload import ActivationOffload
from .blocks import CONTAINERS, Predicate, as_predicate, repeated_blocks

Mode = Literal["full", "selective"]

_KEPT: Final = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
}
_OF_LAYERS: Final = {"aten::mm", "aten::addmm", "aten::linear"}
_KEPT_PREFIXES: Final = ("_c10d_functional", "_dtensor::", "flex_attention")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Which submodules keep only their inputs for backward, which recomputes their forward; results do not change.

    The second forward sees the random numbers, autocast and buffers of the first. Parameters keep their names.
    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Raises:
        ConfigError: for an invalid value.

    Example::

        setting = ActivationCheckpointing(modules=nn.Linear, every=2)
        Trainer(activation_checkpointing=setting, max_epochs=1).fit(module, train_loader)
    """

    mode: Mode | None = "full"
    """``"full"`` recomputes a whole submodule; ``"selective"`` keeps the results of matrix products, convolutions,
    attention and collectives, and recomputes the rest. None recomputes nothing, for use with `offload` alone."""
    every: int = 1
    """Checkpoint only every n-th submodule, starting with the first."""
    every_product: int | None = None
    """With ``"selective"``, also recompute every n-th matrix product of linear layers: 2 keeps half of them, as
    torchtitan does."""
    modules: type[nn.Module] | Sequence[type[nn.Module]] | Predicate | None = None
    """The classes of the submodules, or a function of a submodule's name and the submodule that selects them. By
    default the repeated blocks: submodules of one class, side by side in a ModuleList or a Sequential."""
    offload: bool = False
    """Move what a submodule keeps to the CPU, and back for backward. With ``"selective"``, torch versions older than
    2.14 may move inputs only."""

    _MODES: ClassVar = ("full", "selective", None)

    def __post_init__(self) -> None:
        if self.mode not in self._MODES:
            raise ConfigError(
                f"mode of ActivationCheckpointing must be 'full', 'selective' or None, got {self.mode!r}."
                f"{did_you_mean(str(self.mode), ['full', 'selective'])}"
            )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(
                f"every of ActivationCheckpointing must be an int >= 1, got {self.every!r}; give 1 for each submodule, "
                "n for every n-th."
            )
        if self.every_product is not None and (
            self.mode != "selective" or isinstance(self.every_product, bool) or self.every_product < 2
        ):
            raise ConfigError(
                "every_product of ActivationCheckpointing must be an int >= 2, with mode='selective', got "
                f"{self.every_product!r} with mode={self.mode!r}; leave it out to keep all matrix products."
            )
        if self.modules is not None and as_predicate(self.modules) is None:
            raise ConfigError(
                "modules of ActivationCheckpointing must be module classes or a function of a submodule's name and the "
                f"submodule, got {self.modules!r:.80}; give one of these, or leave it out for the repeated blocks."
            )
        if self.mode is None and not self.offload:
            raise ConfigError(
                f"ActivationCheckpointing(mode=None, offload={self.offload}) does nothing; set offload=True, or leave "
                "activation_checkpointing out."
            )

    @classmethod
    def of(cls, setting: Mode | int | ActivationCheckpointing | None) -> ActivationCheckpointing | None:
        """Return the settings for a short form: a mode, or a number n for every n-th block.

        Raises:
            ConfigError: for an invalid value.
        """
        if setting is None or isinstance(setting, ActivationCheckpointing):
            return setting
        return cls(every=setting) if isinstance(setting, int) else cls(mode=setting)

    def submodules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the submodules that these settings select in a module, with their names.

        Raises:
            ConfigError: if there are none.
        """
        if self.modules is None:
            selected = [(name, block) for name, block in repeated_blocks(module) if not _is_layer(block)]
        else:
            is_selected = as_predicate(self.modules)
            assert is_selected is not None
            named = (
                (name, submodule)
                for name, submodule in module.named_modules()
                if name and not isinstance(submodule, CONTAINERS)
            )
            selected = [(name, submodule) for name, submodule in named if is_selected(name, submodule)]
        if not selected:
            kinds = ", ".join(
                sorted({type(submodule).__name__ for submodule in module.modules() if submodule is not module})
            )
            sought = (
                "two or more blocks of one class, side by side in a ModuleList or a Sequential"
                if self.modules is None
                else f"modules={self.modules!r:.80}"
            )
            raise ConfigError(
                f"activation_checkpointing found no submodules in {type(module).__name__}, which consists of "
                f"{kinds or 'no submodules'}; it looked for {sought}. Name them: ActivationCheckpointing(modules=...) "
                "takes their classes, or a function of a submodule's name and the submodule."
            )
        unique = {submodule: name for name, submodule in reversed(selected)}  # a submodule may have two names
        return [(name, submodule) for submodule, name in reversed(unique.items())][:: self.every]


@contextmanager
def checkpointing_activations(module: nn.Module, setting: ActivationCheckpointing | None) -> Iterator[None]:
    """Checkpoint the activations of the submodules that a setting selects; on exit, restore the module.

    Raises:
        ConfigError: if there are none.
    """
    submodules = [] if setting is None else [submodule for _, submodule in setting.submodules(module)]
    before = [vars(submodule).get("forward") for submodule in submodules]
    offload = ActivationOffload() if setting is not None and setting.offload else None
    for submodule in submodules:
        assert setting is not None
        # on the instance: a wrapper module would change parameter names
        vars(submodule)["forward"] = MethodType(_make_forward(submodule, setting, offload), submodule)
    try:
        yield
    finally:
        for submodule, forward in zip(submodules, before, strict=True):
            del vars(submodule)["forward"]
            if forward is not None:
                vars(submodule)["forward"] = forward
        if offload is not None:
            offload.close()


def _make_forward(
    submodule: nn.Module, setting: ActivationCheckpointing, offload: ActivationOffload | None
) -> Callable[..., object]:
    """Return a new ``forward`` method for a submodule; it can also be bound to a replica of the submodule."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    own = vars(submodule).get("forward")
    options: dict[str, Any] = {"use_reentrant": False}
    is_selective = setting.mode == "selective"
    if is_selective:
        every = setting.every_product

        def contexts() -> object:
            return create_selective_checkpoint_contexts(_selective_policy if every is None else _EveryProduct(every))

        options["context_fn"] = contexts
        # lets hooks such as those of offloading see the kept tensors; torch versions older than 2.14 may not have it
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            options["respect_saved_tensors_hooks"] = True
    has_buffers = next(submodule.buffers(), None) is not None
    changing = _Changing()
    is_computed_again = setting.mode is not None

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        plain = partial(type(self).forward, self) if own is None else own
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with nullcontext() if offload is None else offload.hooks():
            if not is_computed_again:
                return plain(*args, **kwargs)
            args = tuple(_without_cache(value, self) for value in args)
            kwargs = {name: _without_cache(value, self) for name, value in kwargs.items()}
            if kwargs:  # checkpoint() has keyword arguments of its own
                plain = partial(plain, **kwargs)
            if not torch.compiler.is_compiling():  # compiled code updates buffers once, and has no autocast cache
                plain = _in_function_modes(_in_default_dtype(plain))
                plain = _without_cast_cache(plain) if is_selective else plain
                plain = _WithBuffers(plain, self, changing) if has_buffers else plain
            return checkpoint(plain, *args, **options)

    return forward


def _is_layer(submodule: nn.Module) -> bool:
    """Return whether a submodule is a single torch layer, which keeps little more than its input anyway."""
    return type(submodule).__module__.startswith("torch.nn.") and next(submodule.children(), None) is None


def _in_default_dtype(function: Callable[..., object]) -> Callable[..., object]:
    """Make both calls use the current default dtype: backward runs outside the step, which may have set its own."""
    dtype = torch.get_default_dtype()

    def call(*args: object) -> object:
        now = torch.get_default_dtype()
        if now is dtype:
            return function(*args)
        torch.set_default_dtype(dtype)
        try:
            return function(*args)
        finally:
            torch.set_default_dtype(now)

    return call


def _in_function_modes(function: Callable[..., object]) -> Callable[..., object]:
    """Make both calls run in the current TorchFunctionModes: few or none are active during backward."""
    modes = list_function_modes()

    def call(*args: object) -> Any:
        missing = [mode for mode in modes if mode not in list_function_modes()]
        if not missing:
            return function(*args)
        with ExitStack() as stack:
            for mode in missing:
                stack.enter_context(mode)
            return function(*args)

    return call if modes else function


def _without_cast_cache(function: Callable[..., object]) -> Callable[..., object]:
    """Disable the autocast cache: selective checkpointing needs the same number of casts in both calls."""

    def call(*args: object) -> object:
        was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return function(*args)
        finally:
            torch.set_autocast_cache_enabled(was_enabled)

    return call


# --- what is kept ----------------------------------------------------------------------------------------------------


def _selective_policy(context: object, operator: Any, *args: object, **kwargs: object) -> object:
    """Return whether selective checkpointing keeps the result of an operator or computes it again."""
    from torch.utils.checkpoint import CheckpointPolicy

    name = operator.name().partition(".")[0]
    is_kept = (name in _KEPT and not _has_dropout(operator, args, kwargs)) or name.startswith(_KEPT_PREFIXES)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class _EveryProduct:
    """The policy for one call of a submodule that computes every n-th product of a linear layer again, too."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._counts = {False: 0, True: 0}
        """The products so far, of the first forward and of the second one."""

    def __call__(self, context: Any, operator: Any, *args: object, **kwargs: object) -> object:
        from torch.utils.checkpoint import CheckpointPolicy

        if operator.name().partition(".")[0] in _OF_LAYERS:
            self._counts[context.is_recompute] += 1
            if self._counts[context.is_recompute] % self._every == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _selective_policy(context, operator, *args, **kwargs)


def _has_dropout(operator: object, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Return whether an attention draws random numbers: if it were kept, the next operator would draw them instead."""
    for index, argument in enumerate(list_arguments(operator)):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return False


# --- caches of keys and values ---------------------------------------------------------------------------------------


def _without_cache(value: Any, submodule: nn.Module) -> object:
    """Return None for one of transformers' caches that has nothing yet for the layer of a submodule.

    The second forward would attend to the keys that the first has added. An empty cache is the same as none, and
    transformers' own checkpointing gives its layers none either.
    """
    if not (callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))):
        return value
    layers = (getattr(part, "layer_idx", None) for part in submodule.modules())
    layer = next((index for index in layers if isinstance(index, int)), None)
    return value if layer is None or int(value.get_seq_length(layer)) else None


# --- buffers ---------------------------------------------------------------------------------------------------------


_Buffers = dict[str, Tensor | None]


@dataclass
class _Changing:
    """The modules inside a submodule that were seen to change buffers during its forward."""

    indices: set[int] | None = None
    """Their indices in ``submodule.modules()``; None before the first forward."""


class _WithBuffers:
    """A forward that is called twice; the second call starts with the first's buffers and discards its changes.

    Otherwise the running statistics of a batch norm would be updated twice.
    """

    def __init__(self, forward: Callable[..., object], submodule: nn.Module, changing: _Changing) -> None:
        self._forward, self._changing = forward, changing
        self._owners = {index: owner for index, owner in enumerate(submodule.modules()) if find_buffer_dict(owner)}
        self._before: dict[int, _Buffers] | None = None

    def __call__(self, *args: object) -> object:
        return self._first(*args) if self._before is None else self._again(*args)

    def _first(self, *args: object) -> object:
        known, held = self._changing.indices, {i: dict(find_buffer_dict(owner)) for i, owner in self._owners.items()}
        versions = {index: _buffer_versions(buffers) for index, buffers in held.items()}
        copies = {index: _copy_buffers(buffers) for index, buffers in held.items() if known is None or index in known}
        output = self._forward(*args)
        # batch norm's kernels do not increase the version of its statistics, but its module increases its counter's
        now = {index: _buffer_versions(find_buffer_dict(owner)) for index, owner in self._owners.items()}
        changed = {index for index in now if now[index] != versions[index]}
        self._changing.indices = changed | (known or set())
        self._before = {index: copy for index, copy in copies.items() if index in self._changing.indices}
        return output

    def _again(self, *args: object) -> object:
        assert self._before is not None
        assert self._changing.indices is not None
        now = {index: dict(find_buffer_dict(self._owners[index])) for index in self._changing.indices}
        for index, buffers in now.items():
            find_buffer_dict(self._owners[index]).update(_copy_buffers(self._before.get(index, buffers)))
        try:
            return self._forward(*args)
        finally:
            for index, buffers in now.items():
                find_buffer_dict(self._owners[index]).update(buffers)


def _copy_buffers(buffers: _Buffers) -> _Buffers:
    return {name: tensor if tensor is None else tensor.clone() for name, tensor in buffers.items()}


def _buffer_versions(buffers: _Buffers) -> list[tuple[int, int]]:
    """Return each tensor's identity, and its version, which in-place changes outside inference mode increase."""
    tensors = (tensor for tensor in buffers.values() if tensor is not None)
    return [(id(tensor), read_version(tensor)) for tensor in tensors]
