import pytest
import torch

from echelon import ConfigError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.launch.failures import Failure, WorkerExit
from echelon.strategies.launch.peer_failures import blame_peer
from echelon.strategies.pipeline.schedule import check_schedule
from echelon.testing import run_ranks

LOST = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4321")


def joined():
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    return group


def one_fails():
    group = joined()
    found = blame_peer(group, ValueError("unwell") if group.rank == 1 else LOST)
    torch.distributed.barrier()
    return None if found is None else str(found)


def one_is_silent():
    group = joined()
    found = None if group.rank == 2 else blame_peer(group, LOST)
    torch.distributed.barrier()
    return None if found is None else str(found)


def test_the_rank_that_failed_is_named_by_those_that_lost_it():
    first, second, third = run_ranks(one_fails, 3, timeout=240.0)
    assert second is None  # its own error says more
    assert first == "Rank 0 of 3 lost the others: rank 1 failed with ValueError: unwell. See the output there."
    assert "rank 1 failed with ValueError: unwell" in third


def test_a_rank_that_left_without_an_error_is_named():
    first, second, third = run_ranks(one_is_silent, 3, timeout=240.0)
    assert "rank 2 ended without an error" in first
    assert "rank 2 ended without an error" in second
    assert third is None


def test_an_error_that_names_its_cause_is_not_put_down_to_calls_that_differ():
    with pytest.raises(ConfigError) as caught:
        check_schedule("none", None)  # raised by Echelon itself, as a collective's is
    told = WorkerExit(1, 2, 4711, 1, Failure.of(caught.value))
    lost = WorkerExit(0, 2, 4710, 1, Failure.of(LOST))
    assert (told.may_be_of_calls_that_differ, lost.may_be_of_calls_that_differ) == (False, True)
