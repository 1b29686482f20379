"""TrainedSamples: the samples of the current training micro-batch, for callbacks that follow them."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.sample_order import Reading, Source
from .session import Session


class TrainedSamples:
    """Reads the samples of a run from its micro-batches; this costs nothing unless it is used."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def sources(self) -> Sequence[Source]:
        """Return what is known about the order of each training loader in this epoch."""
        data = self._session.train_data
        return data.sources() if data is not None else ()

    def readings(self) -> Sequence[Reading]:
        """Return what each loader contributed to the last training micro-batch."""
        micro_batch = self._session.progress.micro_batch
        if micro_batch is None:
            return ()
        return micro_batch.readings if micro_batch.readings is not None else [micro_batch.reading(0)]
