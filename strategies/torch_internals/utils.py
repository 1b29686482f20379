"""Private names of torch.utils: the workers of data loaders, and what writes files for TensorBoard."""

from __future__ import annotations

from typing import Any

from .versions import names_of_torch


def hide_worker_info() -> None:
    """Let ``get_worker_info()`` return None from now on in this worker process, for a data set that another divides.

    Seen in torch 2.11 to 2.15.
    """
    from torch.utils.data._utils import worker

    worker._worker_info = None  # noqa: SLF001


def has_workers(iterator: object) -> bool:
    """Return whether an iterator is that of a DataLoader with worker processes (torch 2.11 to 2.15)."""
    return hasattr(iterator, "_shutdown_workers")


def end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator (torch 2.11 to 2.15)."""
    iterator._shutdown_workers()  # noqa: SLF001


def find_file_writer(summary_writer: Any) -> Any:
    """Return what writes the events of a SummaryWriter to its file (torch 2.11 to 2.15)."""
    with names_of_torch:
        write = summary_writer._get_file_writer  # noqa: SLF001
    return write()


def drop_iterator(loader: Any) -> None:
    """Let a DataLoader make a new iterator for its next epoch, and end workers that it kept (`_iterator`).

    Otherwise the garbage collector would end them, which takes 10 s. Seen in torch 2.11 to 2.15.
    """
    vars(loader)["_iterator"] = None


def find_index_sampler(iterator: object) -> object:
    """Return the sampler that an iterator of a DataLoader reads (`_index_sampler`; torch 2.11 to 2.15)."""
    return vars(iterator).get("_index_sampler")
