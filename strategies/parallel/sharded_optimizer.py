"""ShardedOptimizer: an optimizer whose state is spread over the ranks by torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..errors import ConfigError
from ..state.optimizer_state import needs_closure


class ShardedOptimizer:
    """A user's optimizer of which this rank keeps the state of some parameters and updates only those.

    The user's object stays what schedulers, callbacks and gradient scaler hold: its groups have all parameters, and its
    ``state`` what this rank owns. Only its ``step`` becomes another: this rank's part of it, then a broadcast of the
    new parameters from their owners. Whole parameters are dealt, the largest first, to the rank with the least.
    Collective: every rank makes one.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1.

    Raises:
        ConfigError: for an optimizer that evaluates the loss itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if needs_closure(optimizer):
            raise ConfigError(
                f"strategy='zero' cannot shard {type(optimizer).__name__}, which searches over all parameters at once; "
                "use strategy='ddp', or an optimizer that updates each parameter by itself."
            )
        self._optimizer = optimizer
        # the groups become those of the user's optimizer: one dict each, seen by both
        make: Any = self._make_own  # which torch calls as it would the class
        self._zero: Any = ZeroRedundancyOptimizer(
            list(optimizer.param_groups), optimizer_class=make, **optimizer.defaults
        )
        self._follow()
        step: Any = partial(Optimizer.profile_hook_step(self._step), optimizer)
        step._wrapped_by_lr_sched = True  # noqa: SLF001 - and so a scheduler made later does not wrap it
        vars(optimizer).update(step=step, _step_supports_amp_scaling=False)

    def _make_own(self, groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        """Return the user's optimizer once more, with this rank's parameters in its groups.

        Made as unpickling makes one: a constructor may have other arguments than the defaults of the groups.
        """
        optimizer = self._optimizer
        own: Optimizer = object.__new__(type(optimizer))
        # neither a scheduler's wrapper of the step nor hooks: they are for the user's object
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name != "step" and not name.startswith("_optimizer_")
        }
        own.__setstate__({**attributes, "state": defaultdict(dict), "param_groups": groups})
        return own

    def owns(self, parameter: Any) -> bool:
        """Return whether this rank keeps the state of a parameter."""
        return bool(self._zero._param_to_rank[parameter] == self._zero.rank)  # noqa: SLF001 - nothing public tells

    def _follow(self) -> None:
        """Take over groups that were added to the user's optimizer, and groups and state that were loaded into it."""
        optimizer, zero = self._optimizer, self._zero
        for group in optimizer.param_groups[len(zero.param_groups) :]:
            zero.add_param_group(group)
        zero.param_groups = list(optimizer.param_groups)
        if zero.optim.state is not optimizer.state:
            for parameter in [parameter for parameter in optimizer.state if not self.owns(parameter)]:
                del optimizer.state[parameter]
            zero.optim.state = optimizer.state

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - for the warning of schedulers
        self._follow()
        return self._zero.step(closure)
