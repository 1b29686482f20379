"""Calls from outside: a part of a unit that was called while the unit was not gathered, found in an error."""

from __future__ import annotations

from torch import nn

from ..state.dtensor import is_dtensor, plain_kind


def outside_call(module: nn.Module, error: BaseException) -> str | None:
    """Return a sentence that names the part whose call failed, its unit, and the policy that helps; None if none did.

    A part that is a unit itself is gathered wherever it is called.
    """
    from torch.distributed.fsdp import FSDPModule

    names = {id(part): name for name, part in module.named_modules()}
    part, traceback = None, error.__traceback__
    while traceback is not None:
        called = traceback.tb_frame.f_locals.get("self")
        part = called if isinstance(called, nn.Module) and id(called) in names else part
        traceback = traceback.tb_next
    if part is None or isinstance(part, FSDPModule) or not any(map(is_dtensor, part.parameters(recurse=False))):
        return None
    name = names[id(part)]
    prefixes = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    units = [(prefix, unit) for prefix in prefixes if isinstance(unit := module.get_submodule(prefix), FSDPModule)]
    if not units:
        return None
    prefix, unit = units[0]
    kind, own = plain_kind(unit).__name__, name.removeprefix(f"{prefix}.")
    return (
        f"Here {name} ({type(part).__name__}) was called from outside of its unit {prefix} ({kind}); make it a unit of "
        f"its own, which is gathered wherever it is called: policy=lambda name, part: isinstance(part, {kind}) or "
        f"name.endswith({own!r})."
    )
