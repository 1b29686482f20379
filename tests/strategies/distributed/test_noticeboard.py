"""Messages over a real store, between threads and between processes."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from echelon.strategies.distributed.noticeboard import Noticeboard
from echelon.testing import run_ranks


@pytest.fixture
def board():
    return Noticeboard(dist.HashStore(), "tests")


def test_messages_are_any_json_and_the_last_one_counts(board):
    assert board.read("plan") is None and not board.has("plan")
    board.post("plan", {"ranks": [0, 1], "text": "grün", "none": None})
    assert board.read("plan") == {"ranks": [0, 1], "text": "grün", "none": None}
    board.post("plan", 2)
    assert board.read("plan") == 2
    board.post("over")
    assert board.has("over") and board.read("over") is None


def test_boards_of_one_store_do_not_see_each_other():
    store = dist.HashStore()
    Noticeboard(store, "one").post("key", 1)
    assert Noticeboard(store, "one").read("key") == 1
    assert not Noticeboard(store, "other").has("key")


def test_the_first_of_several_messages_stands(board):
    assert board.post_first("verdict", "yes") == "yes"
    assert board.post_first("verdict", "no") == "yes"
    assert board.read("verdict") == "yes"


def test_a_wait_ends_when_all_are_there(board):
    later = threading.Timer(0.1, lambda: [board.post(key, key.upper()) for key in ("a", "b")])
    later.start()
    assert board.wait_for(["a", "b"]) == {"a": "A", "b": "B"}
    later.join()


def test_a_wait_returns_what_came_in_time(board):
    board.post("a")
    start = time.monotonic()
    assert board.wait_for(["a", "b"], timeout=0.2) == {"a": None}
    assert 0.2 <= time.monotonic() - start < 60


def test_a_wait_ends_early_where_nothing_more_is_awaited(board):
    board.post("a", "failed")
    assert board.wait_for(["a", "b"], until=lambda messages: "failed" in messages.values()) == {"a": "failed"}

    def end(messages):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        board.wait_for(["b"], until=end)


def take_turns():
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    board = Noticeboard(store, "run")
    board.post(f"rank/{rank}", {"rank": rank, "long": "x" * 10**6})
    messages = board.wait_for([f"rank/{other}" for other in range(3)], timeout=240)
    keys = store.num_keys()
    board.post(f"seen/{rank}")
    board.wait_for([f"seen/{other}" for other in range(3)], timeout=240)
    board.remove_once_read(3, *(f"rank/{other}" for other in range(3)))
    return [message["rank"] for message in messages.values()], board.count("calls"), keys, board.has("rank/0")


def test_processes_meet_and_the_last_one_clears_away():
    results = run_ranks(take_turns, 3)
    assert [ranks for ranks, *_ in results] == [[0, 1, 2]] * 3
    assert sorted(number for _, number, *_ in results) == [1, 2, 3]
    assert not all(is_there for *_, is_there in results)
