"""Loading of a pretrained model: each rank reads from the files of a folder only what it keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn

from ...common.errors import ConfigError
from ...common.internals.hugging_face import list_kept_in_float32, plan_dtypes
from ...common.storage import AnyPath
from ..state.sources import fill_from
from ..torch_internals.operators import disable_dispatch_modes
from ..torch_internals.tensors import DisableTorchFunction
from .conversions import is_of_transformers, under_own_names
from .find_folder import check_dtype, find_folder, open_sources
from .libraries import is_of_diffusers
from .matching import Match, match_sources
from .read_tensors import tensors_read
from .whole_builds import LOADED

M = TypeVar("M", bound=nn.Module)


def load_pretrained(
    model: M,
    folder_or_id: str | AnyPath,
    dtype: torch.dtype | str | None = None,
    *,
    resize: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
) -> M:
    """Load the weights of a Hugging Face folder into a model, in ``configure_model``, under any strategy.

    With ``deferred_init=True``, nothing is read yet, and no random values are drawn for what is loaded: once the module
    is sharded, each rank reads its blocks of the files. Otherwise the values are read at once. The model's own key
    conversions apply, as in ``from_pretrained``: renamed, fused and split tensors, the prefix of the base model, tied
    weights. Any other module can be loaded from a folder with its own names.

    Args:
        model: the model, built from its config (``AutoModelForCausalLM.from_config(config)``).
        folder_or_id: a folder with ``model.safetensors``, or several files and their index; its URL in a store, from
            which one process of each node copies it; or the id of a model on the hub, which huggingface_hub then
            brings. Of a pipeline of diffusers, give the folder of a part, as ``unet``.
        dtype: the dtype of the parameters and loaded buffers; by default the one that they were built with, as by
            ``from_config(config, dtype=torch.bfloat16)``.
        resize: patterns (``"*embed_tokens"``) of tensors that have another number of rows than in the folder, as for
            another vocabulary: the rows that both have are loaded, further ones keep their values.
        ignore: patterns (``"classifier"``) of tensors that keep their values, or that stay in the folder.

    Returns:
        The model.

    Raises:
        CheckpointError: for a folder that cannot be read, and once for all tensors that are missing, unexpected or of
            another shape.
        ConfigError: for arguments that are no models, dtypes or patterns.

    Example::

        class Finetuning(TrainModule):
            def configure_model(self):
                if self.lm is None:  # it is called again for an evaluation
                    config = AutoConfig.from_pretrained("models/llama")
                    self.lm = load_pretrained(AutoModelForCausalLM.from_config(config), "models/llama")
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"load_pretrained needs a built model, got {type(model).__name__} {model!r:.60}; build it from its config: "
            "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))."
        )
    if getattr(model, "hf_quantizer", None) is not None or hasattr(model, "peft_config"):
        raise ConfigError(
            f"load_pretrained needs a plain model, got a {type(model).__name__} that is quantized or has adapters; "
            "load the base first, then quantize it or add the adapters."
        )
    found, resized, ignored = check_dtype(dtype), _check_patterns(resize, "resize"), _check_patterns(ignore, "ignore")
    folder = find_folder(folder_or_id)
    with _without_modes():
        named = under_own_names(model, open_sources(folder))
        matched = match_sources(model, named, resize=resized, ignore=ignored, folder=folder)
    if found is not None:
        _convert_dtypes(model, found, matched)
    for name, source in matched.sources.items():
        tensor = matched.tensors[name]
        if name in matched.resized:
            tensor = tensor[: min(tensor.shape[0], source.shape[0])]
        with torch.no_grad():
            fill_from(tensor.detach() if tensor.requires_grad else tensor, source)
        whole = matched.tensors[name]
        if isinstance(whole, nn.Parameter) and name not in matched.resized:
            tensors_read(model).note(whole)
    vars(model)[LOADED] = str(folder_or_id)
    return model


def _check_patterns(given: str | Iterable[str], name: str) -> list[str]:
    patterns = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigError(f"{name} must be a pattern of names such as 'lm_head', or several, got {given!r:.80}.")
    return patterns


@contextmanager
def _without_modes() -> Iterator[None]:
    """Leave the modes around the caller, such as those in which the deferred initialization records."""
    with ExitStack() as stack:
        stack.enter_context(disable_dispatch_modes())
        stack.enter_context(DisableTorchFunction())
        yield


def _convert_dtypes(model: nn.Module, dtype: torch.dtype, matched: Match) -> None:
    """Convert the parameters, and the buffers that are loaded, but for those that a model keeps in float32."""
    kept: dict[str, torch.dtype] = {}
    if is_of_transformers(model):
        kept = dict(plan_dtypes(model, dtype))
        vars(model)["config"].dtype = dtype
    elif is_of_diffusers(model) and dtype.itemsize < torch.float32.itemsize:
        kept = dict.fromkeys(list_kept_in_float32(model), torch.float32)
    loaded = {id(tensor) for tensor in matched.tensors.values()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or id(tensor) in loaded):
            other = next((kind for pattern, kind in kept.items() if re.search(rf"(^|\.){pattern}(\.|$)", name)), dtype)
            with torch.no_grad():
                tensor.data = tensor.data.to(other)
