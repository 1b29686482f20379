"""Blocks and functions that only rank 0 runs, or that it runs first, on real ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import ProcessError, RunError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.distributed.rank_zero import rank_zero_first, rank_zero_only
from echelon.testing import run_ranks


@rank_zero_only
def where(text, *, number):
    """Say where."""
    return text, number


@rank_zero_only(default="elsewhere")
def where_or_default():
    return "here"


def test_alone_everything_runs():
    assert where("here", number=1) == ("here", 1) and where_or_default() == "here"
    assert (where.__name__, where.__doc__) == ("where", "Say where.")
    with rank_zero_first(), rank_zero_first(local=True):
        pass
    with pytest.raises(ZeroDivisionError), rank_zero_first():
        raise ZeroDivisionError


def use_before_and_after_joining(folder):
    before = where("before", number=1), where_or_default()
    too_early = "among 3 processes needs their process group, which they have not joined yet"
    with pytest.raises(RunError, match=too_early), rank_zero_first():
        pass
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    after = where("after", number=2), where_or_default()
    return before, after, *take_turns(folder, group)


def take_turns(folder, group):
    store = dist.distributed_c10d._get_default_store()
    seen, counts = [], []
    for turn in range(3):
        with rank_zero_first(local=turn == 1):
            file = Path(folder) / f"{turn}"
            seen.append(file.exists())
            if group.rank == 0:
                file.write_text("downloaded")
        group.cpu_group.barrier().wait()
        counts.append(store.num_keys())
        group.cpu_group.barrier().wait()
    assert counts[2] == counts[1]
    kind = OSError if group.rank == 0 else ProcessError
    with pytest.raises(kind, match="disk full") as caught, rank_zero_first():
        raise OSError("disk full")
    if group.rank == 1:  # one of the others may fail alone
        with pytest.raises(ValueError, match="mine"), rank_zero_first():
            raise ValueError("mine")
    else:
        with rank_zero_first():
            pass
    return seen, str(caught.value)


def test_rank_zero_goes_first_and_alone_decides(tmp_path):
    zero, *others = run_ranks(use_before_and_after_joining, 3, os.fspath(tmp_path))
    assert zero[:3] == ((("before", 1), "here"), (("after", 2), "here"), [False] * 3)
    for other in others:
        assert other[:3] == ((None, "elsewhere"), (None, "elsewhere"), [True] * 3)
        assert other[3].endswith("failed in rank_zero_first; see its output: OSError: disk full")
