"""What `run_ranks` promises to users' own tests."""

import os
import sys
import time
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from echelon.common.errors import ProcessError
from echelon.testing import run_ranks


def total(number):
    dist.init_process_group("gloo")
    numbers = torch.tensor(number + dist.get_rank())
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return numbers.item()


def test_results_come_by_rank_and_functions_from_anywhere():
    factor = torch.tensor(2.0)
    assert run_ranks(total, 3, 10) == [33, 33, 33]
    assert run_ranks(lambda: int(os.environ["RANK"]) * factor, 2) == [torch.tensor(0.0), torch.tensor(2.0)]


def test_a_rank_has_what_the_fork_server_of_tests_imports():
    def is_there(names):
        return [name for name in names if name in sys.modules], torch.cuda._is_in_bad_fork()

    names = ["pytest", *(name for name in ("transformers", "torchmetrics") if find_spec(name))]
    assert run_ranks(is_there, 1, names) == [(names, False)]  # and none of them has asked for devices


def test_a_rank_that_hangs_is_killed_and_the_error_says_where_it_stood():
    def sleep_on_rank_one():
        def where_it_hangs():
            time.sleep(600)

        if os.environ["RANK"] == "1":
            where_it_hangs()

    with pytest.raises(ProcessError, match=r"Rank .*1 had not finished after timeout=1 s") as caught:
        run_ranks(sleep_on_rank_one, 2, timeout=1)
    assert "where_it_hangs" in str(caught.value)


class Endless(Dataset):
    """A data set whose samples never come."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(600)


def test_a_worker_of_a_loader_that_hangs_says_where_it_stood():
    with pytest.raises(ProcessError, match=r"\(pt_data_worker\), which rank 0 has started") as caught:
        run_ranks(lambda: next(iter(DataLoader(Endless(), num_workers=1))), 1, timeout=2)
    assert "in __getitem__" in str(caught.value)


def test_a_rank_that_raises_is_named():
    def fail():
        raise KeyError(os.environ["RANK"])

    with pytest.raises(KeyError) as caught:
        run_ranks(fail, 1)
    assert caught.value.args == ("0",)
    assert "rank 0 of 1" in caught.value.__notes__[0]
