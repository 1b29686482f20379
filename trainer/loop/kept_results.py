"""KeptResults: lists and metrics of a module that grow with each step or epoch, and are never emptied."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor, nn

from ...callbacks import __name__ as CALLBACKS
from ...callbacks.callback import Callback
from ...common.internals.metric_states import read_update_count
from ...common.lazy_names import is_imported
from ..session.session import Session
from .eval_mode import EvalInSteps, warn_of_eval_mode, warn_of_overridden_train

_log = logging.getLogger(__name__)

_STEPS: Final = 4
"""The number of steps, in a row, after which a list that grew with each of them is pointed out."""


class KeptResults:
    """Looks after the first steps and epochs of a fit at what the module keeps of them, on rank 0.

    A list of losses with their graphs keeps the memory of every step. In automatic optimization no later backward needs
    them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looks = _STEPS if session.strategy.rank == 0 and session.module.automatic_optimization else 0
        self._lengths: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        self._num_epochs = 0
        self._modes: EvalInSteps | None = None
        is_watched = session.strategy.rank == 0 and not _unfreezes(session.callbacks)
        self._frozen = [name for name, p in session.module.named_parameters() if is_watched and not p.requires_grad]
        self._batches = 0

    def begin(self, left_in_eval: Sequence[str]) -> None:
        """Note the modes of submodules as the first epoch begins; these were in eval mode when the fit began."""
        warn_of_eval_mode(self._session, left_in_eval)
        warn_of_overridden_train(self._session)
        self._modes = EvalInSteps(self._session)

    @property
    def looks(self) -> bool:
        """Whether to look after the next step."""
        return self._looks > 0

    def look(self) -> bool:
        """Look after a step; return whether to look again."""
        if self._looks <= 0:
            return False
        if self._looks == _STEPS:
            _warn_of_hidden(self._session)
            if self._modes is not None:
                self._modes.look()
        self._looks -= 1
        state = self._session.state
        grown, self._batches = state.batches_in_epoch - self._batches, state.batches_in_epoch
        for name, held in vars(self._session.module).items():
            if type(held) is list and held and _has_graph(held[-1]):
                lengths = self._lengths.setdefault(name, [])
                lengths.append(len(held))
                pairs = itertools.pairwise(lengths)
                if len(lengths) == _STEPS and all(after - before == grown for before, after in pairs):
                    warnings.warn(
                        f"{type(self._session.module).__name__}.{name} has grown with each step, and keeps the graphs "
                        f"of all of them in memory; append loss.detach() instead.",
                        stacklevel=2,
                    )
        return self._looks > 0

    def look_at_epoch(self) -> None:
        """Look when an epoch and its hooks have ended: the second time, at what the validations have left."""
        session = self._session
        data = session.evaluation_data
        num_batches = 0 if data is None else sum(data.num_batches)
        self._num_epochs += 1
        self._look_at_frozen()
        if self._num_epochs == 2:
            _look_at_manual_schedules(session)
        if session.strategy.rank or self._num_epochs > 2 or num_batches < 2:
            return
        read = _names_in_hook(session.module)
        counts = {
            f"list {name}": len(held)
            for name, held in vars(session.module).items()
            if name in read and type(held) is list and held and _has_tensor(held[-1])
        }
        counts |= {
            f"metric {name}": count
            for name, part in session.module.named_children()
            if name in read and (count := read_update_count(part)) is not None
        }
        before, self._counts = self._counts, counts
        for name, count in counts.items():
            if self._num_epochs == 2 and name in before and count - before[name] == num_batches:
                remedy = "clear()" if name.startswith("list") else "reset()"
                _log.warning(
                    "The %s of %s, which on_validation_epoch_end reads, still has the results of the validation "
                    "before: call its %s there, unless it is meant to grow.",
                    *(name, type(session.module).__name__, remedy),
                )

    def _look_at_frozen(self) -> None:
        """Warn once of parameters that were frozen when training began, are not any more, and have no optimizer."""
        if not self._frozen:
            return
        session = self._session
        named = dict(session.module.named_parameters())
        held = _held_by_optimizers(session)
        names = [name for name in self._frozen if name in named and named[name].requires_grad]
        left = [name for name in names if named[name] not in held]
        if left:
            self._frozen = []
            warnings.warn(
                f"{len(left)} parameters that were frozen require gradients now, such as {left[0]!r}, but no optimizer "
                "has them, and they are not trained: give configure_optimizers all parameters, or add them with "
                "optimizer.add_param_group({'params': ...}) when they are unfrozen (BaseFinetuning does).",
                stacklevel=2,
            )


def _unfreezes(callbacks: Sequence[Callback]) -> bool:
    """Return whether a callback unfreezes layers step by step; it leaves out batch norms."""
    if not is_imported(f"{CALLBACKS}.finetuning"):
        return False
    from ...callbacks.finetuning import BaseFinetuning

    return any(isinstance(callback, BaseFinetuning) for callback in callbacks)


def _held_by_optimizers(session: Session) -> set[Tensor]:
    return {p for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}


def _warn_of_hidden(session: Session) -> None:
    """Warn of parameters in plain lists and dicts, which have gradients, but are in no optimizer."""
    module = session.module
    held = _held_by_optimizers(session)
    held.update(module.parameters())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            hidden = [] if name.startswith("_") else [p for p in _parameters_in(value) if p not in held]
            if any(parameter.grad is not None for parameter in hidden):
                warnings.warn(
                    f"{type(module).__name__}.{path}{'.' if path else ''}{name} holds {len(hidden)} parameters that "
                    "get gradients, but no optimizer has them and checkpoints do not hold them, as a plain list or "
                    "dict hides them: use nn.ParameterDict, nn.ParameterList, nn.ModuleDict or nn.ModuleList.",
                    stacklevel=2,
                )


def _parameters_in(value: Any, depth: int = 3) -> Iterator[nn.Parameter]:
    """Yield the parameters in a list, tuple or dict, and in the modules in it."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    for item in items if depth else ():
        if isinstance(item, nn.Parameter):
            yield item
        elif isinstance(item, nn.Module):
            yield from item.parameters()
        else:
            yield from _parameters_in(item, depth - 1)


def _look_at_manual_schedules(session: Session) -> None:
    """Log that the schedules of a module that optimizes itself have not been stepped in two epochs."""
    names = [type(config.scheduler).__name__ for config in session.schedulers]
    counts = [getattr(config.scheduler, "last_epoch", None) for config in session.schedulers]
    if names and not any(counts) and not session.module.automatic_optimization and session.strategy.rank == 0:
        _log.warning(
            "%s has not been stepped in 2 epochs: in manual optimization, call scheduler.step() of "
            "self.lr_schedulers(), in on_train_epoch_end for example, unless it is meant to wait.",
            names[0],
        )


def _names_in_hook(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of the module's ``on_validation_epoch_end``."""
    code = getattr(getattr(module, "on_validation_epoch_end", None), "__code__", None)
    return code.co_names if code is not None else ()


def _has_graph(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_graph, value.values()))
    return isinstance(value, Tensor) and value.grad_fn is not None


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict | tuple | list):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)
