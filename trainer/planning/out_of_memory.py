"""Notes on a step that ran out of memory: what the rank held, and what needs less with the same optimizer steps."""

from __future__ import annotations

from ...common.units import in_units
from ...strategies.module.memory_estimate import expected_memory, held_memory, shared_bytes
from ...strategies.module.out_of_memory import is_out_of_memory
from ..session.session import Session


def comment_on_memory(session: Session, error: BaseException) -> None:
    """Note on an out-of-memory error of a step what this rank held, by kind, and how to need less."""
    progress = session.progress
    if not is_out_of_memory(error) or progress.stage != "train" or progress.micro_batch is None:
        return
    held = held_memory(session.module, session.optimizers)
    # a forward holds no gradients, but the backward that follows it would
    gradients = expected_memory(session.module, (), session.strategy.memory_share).gradients
    state = held.parameters + max(held.gradients, gradients) + held.optimizer
    error.add_note(
        f"Out of memory: rank {session.strategy.rank} held {in_units(held.parameters)} of parameters, "
        f"{in_units(held.gradients)} of gradients and {in_units(held.optimizer)} of optimizer state; activations, and "
        "temporary memory of operations, took the rest."
    )
    cuts = _suggest_cuts(session, progress.micro_batch.size, state)
    if cuts:
        error.add_note(
            f"With the same global batch, and so the same steps, these need less: {', or '.join(cuts)}; `echelon plan` "
            "shows what fits."
        )


def _suggest_cuts(session: Session, num_samples: int, state: float) -> list[str]:
    settings, strategy = session.settings, session.strategy
    cuts = []
    if num_samples > 1 and session.module.automatic_optimization:
        more = 2 * session.progress.accumulate_grad_batches
        also = "" if settings.global_batch_size is not None else f" and accumulate_grad_batches={more}"
        cuts.append(f"batch_size={-(-num_samples // 2)}{also}")
    if settings.activation_checkpointing is None:
        cuts.append("activation_checkpointing='full'")
    parameters = list(session.module.parameters())
    is_whole = shared_bytes(parameters, strategy.memory_share.parameters) == shared_bytes(parameters, lambda _: 1.0)
    if is_whole and strategy.world_size > 1:
        cuts.append(f"strategy='fsdp', which keeps {in_units(state / strategy.world_size)} of that on each rank")
    return cuts
