"""OmitFrozenWeights: leave out of checkpoints what is frozen, and as the module had it when it was built."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any, Final

from torch import nn

from ..common.errors import ConfigError
from ..strategies.state.omitted_weights import OMITTED, built_digests, bytes_of, left_out
from ..strategies.state.schema import TEXT, check_schema
from .callback import Callback
from .run import Run

_STATE: Final = {"built": {TEXT: TEXT}}
_STATES: Final = ("state_dict", "trained_weights")
"""Where a checkpoint has weights; the second is of `WeightAveraging`."""

_log = logging.getLogger("echelon")


class OmitFrozenWeights(Callback):
    """Leave frozen weights that never change out of all checkpoints of the run, and name them with their digests.

    A weight is left out if it was frozen when the run began (``requires_grad`` is False, and no optimizer has it) and
    still has the values with which the module was built, in ``__init__`` or ``configure_model``: the base of a model
    with adapters, a teacher, a reference model. A frozen weight that changes all the same, as a teacher that follows
    does, is saved; so is one that an earlier run or a loaded checkpoint has changed, and one that is unfrozen later,
    from then on. Buffers are always saved. It holds for what `ModelCheckpoint` saves, for ``save_checkpoint`` and for
    snapshots in memory, and resumed runs are bitwise as ever.

    A run that resumes, on any layout, and ``load_from_checkpoint`` need a module that is built on the same base: they
    compare the digests, and refuse another base by name. A weight of the base that was unfrozen is no longer there for
    a roll-back to a checkpoint from before. ``on_save_checkpoint``, ``on_load_checkpoint`` and ``on_fit_start`` run on
    every rank and communicate.

    Args:
        names: the weights to which it is limited, under their names in the module; by default all that are frozen.

    Raises:
        ConfigError: for names that are one string.
        CheckpointError: on resume, for a module that was built with other values.

    Example::

        class OfHead(Net):
            def __init__(self):
                super().__init__()
                self.backbone.requires_grad_(False)

            def configure_optimizers(self):
                return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

        Trainer(max_epochs=1, callbacks=OmitFrozenWeights()).fit(OfHead(), train_loader)
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        if isinstance(names, str):
            raise ConfigError(f"names must be several names of weights, got {names!r}; give [{names!r}].")
        self.names = names
        self._built: dict[str, str] = {}
        self._is_fitting = self._is_known = self._has_told = False

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the weights of an earlier run."""
        self._is_fitting, self._is_known, self._has_told, self._built = stage == "fit", False, False, {}

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Note the frozen weights as they were built, before those of the checkpoint are loaded. Collective."""
        self._note(trainer, module)

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Note the frozen weights as they were built. Collective."""
        self._note(trainer, module)

    def _note(self, trainer: Run, module: nn.Module) -> None:
        if self._is_fitting and not self._is_known:
            strategy, names = trainer.strategy, self.names
            state = {name: one for name, one in strategy.model_state().items() if names is None or name in names}
            self._built = built_digests(module, state, trainer.optimizers, strategy.ranks.all)
            self._is_known = True

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Replace the weights that are frozen and unchanged by their names. Collective."""
        frozen = {name for name, one in module.named_parameters(remove_duplicate=False) if not one.requires_grad}
        built = {name: digest for name, digest in self._built.items() if name in frozen}
        state = checkpoint["state_dict"]
        omitted = left_out(state, built, trainer.strategy.ranks.all)
        if not omitted:
            return
        if not self._has_told and trainer.is_global_zero:
            size = bytes_of(omitted, state) / 1e6
            _log.info("Checkpoints leave out %d frozen weights (%.1f MB), which the base has", len(omitted), size)
        self._has_told = True
        for part in _STATES:
            if part in checkpoint:
                checkpoint[part] = {name: value for name, value in checkpoint[part].items() if name not in omitted}
        checkpoint[OMITTED] = omitted

    def state_dict(self) -> dict[str, object]:
        """Return the digests, for a save in the process that has started the others."""
        return {"built": dict(self._built)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them, unless this run has its own."""
        check_schema(state_dict, _STATE, "The saved state of OmitFrozenWeights")
        if not self._is_known:
            self._built = dict(state_dict["built"])
