"""Ranks without processes: each one runs in a thread, one at a time, and they meet where they have to agree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from echelon.trainer.data.index_stream import DataRanks

T = TypeVar("T")


def on_ranks(data_size: int, function: Callable[[DataRanks], T], ranks: DataRanks | None = None) -> list[T]:
    """Return a function's result on each rank; ranks take turns, since random generators are global."""
    said: list[list[list[float]]] = [[] for _ in range(data_size)]
    turn, meeting = threading.Lock(), threading.Barrier(data_size, timeout=400)  # a loaded machine forks slowly

    def run(data_rank: int) -> T:
        def agree(numbers: list[float]) -> list[list[float]]:
            said[data_rank].append(numbers)
            turn.release()
            meeting_number = len(said[data_rank])
            try:
                meeting.wait()
            except threading.BrokenBarrierError:  # one rank failed, perhaps after this meeting
                if min(map(len, said)) < meeting_number:
                    raise
            finally:
                turn.acquire()
            return [rows[meeting_number - 1] for rows in said]

        with turn:
            try:
                return function(
                    replace(
                        ranks or DataRanks(),
                        data_rank=data_rank,
                        data_size=data_size,
                        agree=agree if data_size > 1 else None,
                    )
                )
            except BaseException:
                meeting.abort()
                raise

    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def note(data_rank: int) -> None:
        try:
            results[data_rank] = run(data_rank)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors[data_rank] = error

    # Not a pool: a process forked by a thread of concurrent.futures ends with code 1, as it joins that thread, itself.
    threads = [threading.Thread(target=note, args=[data_rank]) for data_rank in range(data_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in sorted(errors.items()):
        raise error
    return [results[data_rank] for data_rank in range(data_size)]
