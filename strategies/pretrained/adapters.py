"""Adapters of peft: the tensors of ``adapter_model.safetensors``, or those of the base model with them merged."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError
from ..state.dtensor import is_dtensor, plain_kind
from ..torch_internals.modules import find_buffer_dict, find_parameter_dict
from ..wrapped.wrapped_tensors import dequantize_tensor, is_wrapped

if TYPE_CHECKING:
    from .saved_names import Fetch, Outline


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is a ``PeftModel``."""
    module: Any = sys.modules.get("peft")  # without it, there is none
    return module is not None and isinstance(model, module.PeftModel)


def base_of(model: Any) -> Any:
    """Return the base model of a model with adapters; another one as is."""
    return model.get_base_model() if is_adapted(model) else model


def check_adapters(model: Any) -> None:
    """Check that the active adapter of a model is one, and that what it has learned can be saved from here.

    Raises:
        ConfigError: for several active adapters, and for prompts that are sharded.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(active)} active adapters ({', '.join(active)}), and one is saved; choose "
            "it with set_adapter."
        )
    if model.peft_config[active[0]].is_prompt_learning:
        sharded = [
            name
            for name, p in model.named_parameters()
            if name.startswith("prompt_encoder") and (is_dtensor(p) or p.is_meta)
        ]
        if sharded:
            raise ConfigError(
                f"{sharded[0]} is a learned prompt, which peft computes from the whole tensor, but it is sharded here; "
                "use strategy='ddp'."
            )


class AdapterTensors:
    """What peft saves of a model: the tensors of its active adapter, under peft's names."""

    def __init__(self, model: Any) -> None:
        check_adapters(model)
        self._model, self._adapter = model, model.active_adapters[0]
        self._empty = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        found = self._select(self._empty)
        known = {id(value): name for name, value in self._empty.items()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = sorted({known[id(value)] for value in found.values() if id(value) in known} | trained)
        from .saved_names import Outline

        self.outlines = [Outline(name, value.shape, value.dtype) for name, value in found.items()]

    def _select(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict
        from peft.utils.constants import EMBEDDING_LAYER_NAMES

        targets = getattr(self._model.peft_config[self._adapter], "target_modules", None) or ()
        layers = {name.rpartition(".")[2] for name in ([targets] if isinstance(targets, str) else targets)}
        # peft's "auto" would ask the hub whether the vocabulary has changed
        saves = bool(layers & set(EMBEDDING_LAYER_NAMES))
        selected: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, state_dict=dict(state), adapter_name=self._adapter, save_embedding_layers=saves
        )
        return selected

    def values(self, fetch: Fetch) -> Iterator[tuple[Outline, Tensor]]:
        """Return each tensor with its values; they are in memory together."""
        found = self._select(self._empty | {name: fetch(name) for name in self.names})
        for outline in self.outlines:
            yield outline, found[outline.name].detach().cpu().to(outline.dtype).contiguous()


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write the config of a model's active adapter, as peft does."""
    config = copy.copy(model.peft_config[model.active_adapters[0]])
    base = base_of(model)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    config.inference_mode = True
    names = {"base_model_class": plain_kind(base).__name__, "parent_library": plain_kind(base).__module__}
    config.save_pretrained(folder, auto_mapping_dict=names if config.task_type is None else None)


class _Layer(NamedTuple):
    """A layer of a model with adapters, or one that has none: what becomes tensors of the base model together."""

    names: Sequence[str]
    """Its tensors, in the model with adapters."""
    prefix: str
    """The beginning of these names."""
    base_prefix: str
    """The beginning of the names of what it becomes."""
    layer: Any
    """The layer that merges; None for one without an adapter."""


class MergedTensors:
    """The tensors of the base model of a model with adapters, into which they are merged layer by layer."""

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        check_adapters(model)
        self._adapter = model.active_adapters[0]
        base = model.get_base_model()
        if model.peft_config[self._adapter].is_prompt_learning:
            raise ConfigError(
                f"merge_adapters=True cannot merge a {model.peft_config[self._adapter].peft_type} prompt, which is "
                "beside the base model; leave it out."
            )
        plain = plain_kind(base)
        with torch.device("meta"):
            self._plain = plain(copy.deepcopy(base.config))
        if "_weight_conversions" in vars(base):
            vars(self._plain)["_weight_conversions"] = vars(base)["_weight_conversions"]
        self._layers: dict[str, _Layer] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        prefix = next(name for name, part in model.named_modules() if part is base)
        self._walk(base, f"{prefix}.", "")
        self._check_ties()
        from .saved_names import SavedTensors, untied_tensors

        own = {
            name: torch.empty(value.shape, dtype=self._dtypes[name], device="meta")
            for name, value in untied_tensors(self._plain).items()
        }
        self._saved = SavedTensors(self._plain, own, dtype)
        self.outlines = self._saved.outlines
        self.names: list[str] = []
        last: _Layer | None = None
        for name in self._saved.names:
            if self._layers[name] is not last:
                last = self._layers[name]
                self.names += last.names

    def _walk(self, module: nn.Module, prefix: str, base_prefix: str) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        if isinstance(module, BaseTunerLayer):
            names = [prefix + name for name in module.state_dict(keep_vars=True)]
            layer = _Layer(names, prefix, base_prefix, module)
            for name, value in module.get_base_layer().state_dict(keep_vars=True).items():
                self._layers[base_prefix + name], self._dtypes[base_prefix + name] = layer, value.dtype
        elif isinstance(module, AuxiliaryTrainingWrapper):
            inner = "token_adapter" if hasattr(module, "token_adapter") else f"modules_to_save.{self._adapter}"
            self._walk(module.get_submodule(inner), f"{prefix}{inner}.", base_prefix)
        else:
            for name, value in module.state_dict(keep_vars=True).items():
                if "." not in name:
                    self._layers[base_prefix + name] = _Layer([prefix + name], prefix, base_prefix, None)
                    self._dtypes[base_prefix + name] = value.dtype
            for name, child in module.named_children():
                self._walk(child, f"{prefix}{name}.", f"{base_prefix}{name}.")

    def _check_ties(self) -> None:
        for name, first in (getattr(self._plain, "all_tied_weights_keys", None) or {}).items():
            if self._layers[name].layer is not None or self._layers[first].layer is not None:
                raise ConfigError(
                    f"merge_adapters=True would make {name} and {first} differ, which are one tensor in the base; "
                    "save the adapter alone, or build the base with tie_word_embeddings=False."
                )

    def values(self, fetch: Fetch) -> Iterator[tuple[Outline, Tensor]]:
        """Return each tensor with its values; at one time, those of one layer are in memory."""
        last: tuple[_Layer | None, dict[str, Tensor]] = (None, {})

        def merged(name: str) -> Tensor:
            nonlocal last
            layer = self._layers[name]
            if last[0] is not layer:
                last = (layer, self._merge(layer, {own: fetch(own) for own in layer.names}))
            return last[1][name]

        yield from self._saved.values(merged)

    def _merge(self, layer: _Layer, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        if layer.layer is None:
            return {layer.base_prefix + name.removeprefix(layer.prefix): value for name, value in whole.items()}
        # what an adapter adds to a quantized weight is lost if the sum is quantized again
        plain = {name: dequantize_tensor(value) if is_wrapped(value) else value for name, value in whole.items()}
        copied = _with_whole(layer.layer, layer.prefix, plain)
        with torch.no_grad():
            copied.merge(adapter_names=[self._adapter])
        return {layer.base_prefix + name: value for name, value in copied.get_base_layer().state_dict().items()}


def _with_whole(module: nn.Module, prefix: str, whole: dict[str, Tensor]) -> Any:
    """Return a copy of a layer with whole tensors, without what sharding has added to it."""
    kind = plain_kind(module)
    copied: Any = kind.__new__(kind)
    vars(copied).update({key: copy.copy(value) for key, value in vars(module).items() if key != "forward"})
    held: Any
    for held in (find_parameter_dict(copied), find_buffer_dict(copied)):
        for name, value in held.items():
            if value is not None and prefix + name in whole:
                tensor = whole[prefix + name]
                held[name] = nn.Parameter(tensor, requires_grad=False) if isinstance(value, nn.Parameter) else tensor
    children = {name: _with_whole(child, f"{prefix}{name}.", whole) for name, child in module.named_children()}
    vars(copied)["_modules"] = children
    return copied
