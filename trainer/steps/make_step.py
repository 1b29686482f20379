"""The choice of the optimizer step."""

from __future__ import annotations

from ..loop.step import Step
from ..session.session import Session


def make_step(session: Session) -> Step:
    """Return the implementation of the optimizer step for this run."""
    ranks = session.placed.ranks
    if ranks.stage.world_size > 1:
        from .pipeline_step import PipelineStep

        return PipelineStep(session)
    if ranks.count.world_size > 1:
        from ..loop.shared_step import SharedStep

        return SharedStep(session)
    from .one_rank_step import OneRankStep

    return OneRankStep(session)
