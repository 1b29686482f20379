"""SaveConfigCallback: write the config of a LightningCLI into the folder of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...callbacks import Callback
from ...callbacks.dispatch import overrides_method
from ...callbacks.run import Run
from ...common.errors import ConfigError, RunError
from .parser import LightningArgumentParser


class SaveConfigCallback(Callback):
    """Write the config into ``log_dir`` when a run begins, once.

    Args:
        parser: the parser that has read it.
        config: what was read.
        config_filename: the name of the file.
        overwrite: replace a file that exists.
        multifile: write as many files as were read.
        save_to_log_dir: False leaves it to `save_config`, which a subclass overrides.

    Raises:
        ConfigError: with ``save_to_log_dir=False`` without a `save_config`.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and not overrides_method(self, "save_config", SaveConfigCallback):
            raise ConfigError(
                f"`save_to_log_dir=False` only makes sense with a save_config that saves the config elsewhere, got "
                f"{type(self).__name__} without one; override it, or leave save_to_log_dir out."
            )
        self.parser, self.config = parser, config
        self.config_filename, self.overwrite, self.multifile = config_filename, overwrite, multifile
        self.save_to_log_dir, self.already_saved = save_to_log_dir, False

    def save_config(self, trainer: Run, pl_module: Any, stage: str) -> None:
        """Save the config elsewhere; override it. Called on rank 0 only."""

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Write the config. Collective: every rank calls it.

        Raises:
            RunError: if the file exists, and is not to be replaced.
        """
        if self.already_saved:
            return
        path = Path(trainer.log_dir, self.config_filename)
        if self.save_to_log_dir:
            exists = trainer.strategy.ranks.all.broadcast(path.is_file() and not self.overwrite)
            if exists:
                raise RunError(
                    f"SaveConfigCallback expected {path} to NOT exist. Aborting to avoid overwriting results of a "
                    'previous run: delete it, set save_config_kwargs={"overwrite": True} to replace it, or '
                    "save_config_callback=None to save none."
                )
            if trainer.is_global_zero:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.parser.save(
                    self.config, str(path), skip_none=False, overwrite=self.overwrite, multifile=self.multifile
                )
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)
        self.already_saved = True

    def __getstate__(self) -> dict[str, object]:
        """Send the text of the config to the processes of a run: the parser holds what cannot be pickled."""
        parser: Any = self.parser
        if not isinstance(parser, RenderedConfig):
            parser = RenderedConfig(parser.dump(self.config, skip_none=False))
        return {**vars(self), "parser": parser, "config": None}


class RenderedConfig:
    """The text of a config, in place of its parser.

    Args:
        text: the config as YAML.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def dump(self, config: Any = None, **options: Any) -> str:
        """Return the text."""
        return self._text

    def save(self, config: Any, path: str, **options: Any) -> None:
        """Write the text."""
        Path(path).write_text(self._text, encoding="utf-8")
