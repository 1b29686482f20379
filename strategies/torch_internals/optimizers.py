"""Private names of torch's optimizers, schedulers and gradient scalers, each read or changed by one function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .versions import names_of_torch

_PACKAGE: Final = __name__.partition(".")[0]
_STEP: Final = ("step", "_step_supports_amp_scaling")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a user has given an optimizer hooks (`_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`).

    Those of this package take times on some ranks, and read no parameters.

    Seen in torch 2.11 to 2.15.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())  # noqa: SLF001
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] != _PACKAGE for hook in hooks)


def list_step_hooks(optimizer: Optimizer) -> list[object]:
    """Return the dictionaries of hooks before and after a step: an optimizer's, then those of all optimizers.

    They are `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, and with `_global_optimizer` in the module of
    torch; None for one that is missing.

    Seen in torch 2.11 to 2.15.
    """
    own, of_all = vars(optimizer), vars(sys.modules[Optimizer.__module__])
    hooks = [own.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    return hooks + [of_all.get(f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]


def note_step(optimizer: Optimizer) -> None:
    """Note that an optimizer was stepped, or else schedulers warn that it was not (`_opt_called`).

    Seen in torch 2.11 to 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def has_noted_step(optimizer: Optimizer, step: Any) -> bool:
    """Return whether a step is what a scheduler put there to note one (`_wrapped_by_lr_sched`), and has done so.

    Seen in torch 2.11 to 2.15.
    """
    return bool(getattr(step, "_wrapped_by_lr_sched", False) and getattr(optimizer, "_opt_called", False))


def takes_scaled_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step unscales gradients and looks for overflows (`_step_supports_amp_scaling`).

    Seen in torch 2.11 to 2.15.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def replace_step(optimizer: Optimizer, step: Any) -> dict[str, object]:
    """Set the step of an optimizer, which takes unscaled gradients; return what it replaces, for `put_step_back`.

    Schedulers made later do not wrap it (`_wrapped_by_lr_sched`).

    Seen in torch 2.11 to 2.15.
    """
    own = vars(optimizer)
    replaced: dict[str, object] = {name: own[name] for name in _STEP if name in own}
    step._wrapped_by_lr_sched = True  # noqa: SLF001
    own.update(step=step, _step_supports_amp_scaling=False)
    return replaced


def put_step_back(optimizer: Optimizer, replaced: Mapping[str, object]) -> None:
    """Undo a `replace_step` (torch 2.11 to 2.15)."""
    own = vars(optimizer)
    for name in _STEP:
        own.pop(name, None)
    own.update(replaced)


def make_zero_class() -> Any:
    """Return torch's ZeroRedundancyOptimizer, for parameters of any dtypes (torch 2.11 to 2.15).

    torch's own requires one (`_verify_same_dense_param_type`), for buckets, which are not used here.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class OfAnyDtypes(ZeroRedundancyOptimizer):
        def _verify_same_dense_param_type(self) -> None:
            pass

    return OfAnyDtypes


def find_owners(zero: Any) -> Mapping[Tensor, int]:
    """Return the rank to which a ZeroRedundancyOptimizer assigns each parameter (`_param_to_rank`).

    Seen in torch 2.11 to 2.15.
    """
    owners: Mapping[Tensor, int] = zero._param_to_rank  # noqa: SLF001
    return owners


def step_own_part(zero: Any, closure: Callable[[], object] | None) -> object:
    """Update the parameters that a ZeroRedundancyOptimizer assigns to this rank (`_local_step`), and send none.

    torch's ``step`` would send one at a time. It warns of each change of what is trained, as of buckets, unless that
    is up to date (`_is_trainable_mask`).

    Seen in torch 2.11 to 2.15.
    """
    zero._is_trainable_mask = zero._get_is_trainable_mask()  # noqa: SLF001
    return zero._local_step(closure=closure)  # noqa: SLF001


def list_overflows(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[torch.Tensor]:
    """Return, for each device, whether gradients that were unscaled there are not finite; to be changed in place.

    Where there were none, as on a frozen stage of a pipeline, it is one for `device`: torch steps no optimizer of which
    it knows nothing.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        found: Any = scaler._found_inf_per_device(optimizer)  # noqa: SLF001
    if not found:
        found[device] = torch.zeros((), device=device)
    return list(found.values())


def list_inner_schedulers(scheduler: object) -> Sequence[Any]:
    """Return the schedulers that one of several runs (`_schedulers`; torch 2.11 to 2.15); none of another kind."""
    inner: Sequence[object] = getattr(scheduler, "_schedulers", ())
    return inner
