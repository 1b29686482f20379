"""Stated: a batch with the state of the stream that it came from, on its way from a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ...strategies.distributed.nested import map_tensors


class Stated(NamedTuple):
    """A batch, and where the stream is after it."""

    batch: object
    worker: int
    state: Mapping[str, Any]

    def pin_memory(self, device: object = None) -> Stated:
        """Return it with the batch in pinned memory, as torch's thread for that asks."""
        return self._replace(batch=map_tensors(Tensor.pin_memory, self.batch))


class Reader(Protocol):
    """A stream as one worker reads it."""

    worker: int

    def state_dict(self) -> Mapping[str, Any]:
        """Return where it is, after what was read last."""


class StatingCollate:
    """A loader's ``collate_fn``, whose batches come with the state of the stream.

    In a worker it meets the copy of the stream that is read there, as both are copied together.
    """

    def __init__(self, collate: Callable[[Any], object], reader: Reader) -> None:
        self._collate, self._reader = collate, reader

    def __call__(self, samples: object) -> Stated:
        return Stated(self._collate(samples), self._reader.worker, self._reader.state_dict())


class WorkerBeginning:
    """A loader's ``worker_init_fn``, which sees the user's data set in ``get_worker_info()``."""

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self._begin = begin

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        inner = getattr(info.dataset, "dataset", None)
        if inner is not None:
            object.__setattr__(info, "dataset", inner)  # it refuses others, so that nobody changes it by mistake
        if self._begin is not None:
            self._begin(worker_id)


def with_dataset(loader: DataLoader[object], dataset: Any) -> DataLoader[object]:
    """Return a copy of a loader, with its class and attributes, that reads another stream and its states."""
    import copy

    clone = copy.copy(loader)
    # a DataLoader forbids setting its data set, which could leave it inconsistent: what depends on it is set here
    vars(clone).update(dataset=dataset, collate_fn=StatingCollate(loader.collate_fn, dataset), _iterator=None)
    if loader.num_workers:
        # which worker's turn it is can be known only if batches come in that order (DataLoader(in_order=False))
        vars(clone).update(worker_init_fn=WorkerBeginning(loader.worker_init_fn), in_order=True)
    return clone


def saves_state(dataset: Dataset[Any]) -> bool:
    """Return whether a data set has a state that can be restored."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
