"""HuggingFaceCheckpoint: write the model that is being trained as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common.errors import ConfigError
from ..common.storage import AnyPath, StorePath, any_path, as_path, home_of, node_copy
from ..strategies.pretrained.adapters import base_of, is_adapted
from ..strategies.pretrained.find_folder import check_dtype
from ..strategies.pretrained.save_folder import parse_size
from ..strategies.pretrained.save_model import FolderSettings, find_model, save_model, tensors_of
from ..strategies.state.schema import TEXT, check_schema
from .callback import Callback
from .run import Run


class HuggingFaceCheckpoint(Callback):
    """Write ``<dirpath>/step=<n>``, a folder of Hugging Face, at the end of training and where the arguments say.

    It holds the config, the generation config, the weights under the model's own names, and a tokenizer. A model of
    timm is written as ``timm.create_model("local-dir:...")`` reads it, one of diffusers as its ``from_pretrained``
    does; if it was read from a part of a pipeline's folder, the whole pipeline is written with it. Of a model with
    adapters of peft the folder holds the adapter alone, as peft writes it, or with `merge_adapters` the merged model.

    Rank 0 writes, and gathers one tensor at a time from the shards; the folder is complete or absent. It has no
    optimizer state: runs resume from a `ModelCheckpoint`.

    Args:
        dirpath: the folder of the folders, here or a URL in a store; by default ``<log_dir>/huggingface``.
        every_n_train_steps: write every n optimizer steps as well.
        every_n_epochs: write every n epochs as well.
        part: the name of the model in the module; by default, the one model of transformers, diffusers, timm or peft
            in it.
        dtype: the dtype in which weights are written; by default that of training.
        max_shard_size: the most bytes of a file of weights, as a number or text such as ``"5GB"``; those of timm and of
            adapters are in one file.
        tokenizer: a tokenizer or processor to save beside; by default, the files of the folder that
            `load_pretrained` has read are copied.
        merge_adapters: merge adapters into the base model.
        push_to_hub: the id of a repository of the hub to which each folder is uploaded by huggingface_hub; a failure
            is a warning.

    Raises:
        ConfigError: for an invalid argument, and when training starts, for a module without such a model.

    Example::

        Trainer(callbacks=HuggingFaceCheckpoint("models/mine", every_n_epochs=1, dtype="bfloat16"))
    """

    path_attributes = ("dirpath",)

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        part: str | None = None,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
        tokenizer: Any = None,
        merge_adapters: bool = False,
        push_to_hub: str | None = None,
    ) -> None:
        for name, number in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be at least 1, or None, got {number}.")
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise ConfigError(
                f"tokenizer must have save_pretrained, as those of transformers, got {type(tokenizer).__name__}; leave "
                "it out if there is none."
            )
        if push_to_hub is not None and not isinstance(push_to_hub, str):
            raise ConfigError(f"push_to_hub must be the id of a repository such as 'me/model', got {push_to_hub!r}.")
        self.dirpath = None if dirpath is None else str(any_path("dirpath", dirpath))
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        self.part, self.push_to_hub = part, push_to_hub
        self.settings = FolderSettings(check_dtype(dtype), parse_size(max_shard_size), merge_adapters, tokenizer)
        self.last_path = self._written = ""
        """The folder that was written last."""

    @property
    def state_key(self) -> str:
        """A run may have several, which write different folders, or different parts or forms of a model."""
        about = {
            "dirpath": self.dirpath,
            "part": self.part,
            "dtype": self.settings.dtype,
            "merge_adapters": self.settings.merge_adapters,
        }
        return f"{type(self).__name__}{about}"

    def state_dict(self) -> dict[str, object]:
        """Return the folder that was written last, which a program that has launched a fit asks for."""
        return {"last_path": self.last_path}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the folder that was written last."""
        check_schema(state_dict, {"last_path": TEXT}, "The saved state of HuggingFaceCheckpoint")
        self.last_path = state_dict["last_path"]

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Check that there is a model that can be written; on every rank."""
        _, model = find_model(module, self.part)
        if self.settings.merge_adapters and not is_adapted(model):
            raise ConfigError(
                f"merge_adapters=True needs a model with adapters of peft, got {type(base_of(model)).__name__}; leave "
                "it out."
            )
        tensors_of(model, self.settings)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Write every n steps. Collective: every rank calls it."""
        if self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0:
            self.save(trainer, module)

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Write every n epochs. Collective: every rank calls it."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.save(trainer, module)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Write at the end. Collective: every rank calls it."""
        self.save(trainer, module)

    def save(self, trainer: Run, module: nn.Module) -> None:
        """Write the model now, unless this step's has been written. Collective: every rank calls it."""
        folder = self.dirpath or trainer.strategy.ranks.all.broadcast(str(home_of(trainer.log_dir) / "huggingface"))
        path = as_path(folder) / f"step={trainer.global_step}"
        if str(path) == self._written:
            return
        save_model(path, module, self.part, trainer.strategy.placed, self.settings)
        self.last_path = self._written = str(path)
        if self.push_to_hub is not None and trainer.is_global_zero:
            self._push(path)

    def _push(self, path: AnyPath) -> None:
        try:
            from huggingface_hub import HfApi

            here = node_copy(path) if isinstance(path, StorePath) else path

            api = HfApi()
            api.create_repo(self.push_to_hub, exist_ok=True)
            api.upload_folder(repo_id=self.push_to_hub, folder_path=here, commit_message=path.name)
        except Exception as error:  # noqa: BLE001 - whatever the network does, training goes on
            warnings.warn(
                f"{path} was not uploaded to {self.push_to_hub} ({type(error).__name__}: {str(error)[:200]}); it is "
                f"complete here: upload it with `hf upload {self.push_to_hub} {path}`.",
                stacklevel=2,
            )
