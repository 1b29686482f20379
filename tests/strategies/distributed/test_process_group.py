import logging
import re
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from ports import free_port

from echelon.common.errors import ConfigError, ProcessError
from echelon.strategies.cluster import start_wait
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.testing import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def unused_port():
    return free_port()


def join_twice():
    environment = detect_environment()
    group = ProcessGroup(environment, CPU)
    group.join()
    again = ProcessGroup(environment, CPU)
    again.join()
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    with pytest.raises(ConfigError, match="already initialized, with rank . of 2, but this process .* of 5"):
        ProcessGroup(replace(environment, world_size=5), CPU).join()
    return group.rank, again.world_size, group.backend, ones.item()


def join_as_three():
    environment = replace(detect_environment(), world_size=3)
    try:
        ProcessGroup(environment, CPU, start_timeout=timedelta(seconds=2)).join()
    except ProcessError as error:
        return str(error)
    return None


def test_a_group_that_is_there_is_joined_again_and_must_be_the_same():
    assert run_ranks(join_twice, 2, timeout=240.0) == [(0, 2, "gloo", 2.0), (1, 2, "gloo", 2.0)]


def test_ranks_that_do_not_come_are_named():
    messages = run_ranks(join_as_three, 2, timeout=240.0)
    assert all("Only 2 of 3 processes connected within 2 s; missing: rank 2" in message for message in messages)


def test_a_store_that_cannot_be_opened_is_named(unused_port):
    environment = replace(
        detect_environment({}), launcher="srun", rank=1, world_size=2, main_port=unused_port, num_nodes=1
    )
    with pytest.raises(ProcessError, match=f"Rank 1 cannot reach the store of the run at 127.0.0.1:{unused_port}"):
        ProcessGroup(environment, CPU, start_timeout=timedelta(seconds=1)).join()


def test_a_port_that_is_taken_is_named(taken_port):
    environment = replace(
        detect_environment({}), launcher="srun", rank=0, world_size=2, main_port=taken_port, num_nodes=1
    )
    with pytest.raises(ProcessError, match=f"Rank 0 cannot open the store of the run at 127.0.0.1:{taken_port}"):
        ProcessGroup(environment, CPU, start_timeout=timedelta(seconds=1)).join()


def join_loudly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_wait, "_FIRST", 0.2)
        patch.setattr(start_wait, "_EVERY", 0.2)
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("echelon").addHandler(handler)
        join_as_three()
        return told


def test_rank_0_says_whom_it_waits_for_and_how_long_it_still_will():
    first, second = run_ranks(join_loudly, 2, timeout=240.0)
    assert len(first) > 1 and second == []
    pattern = (
        r"Waiting for rank (?:1, )?2 of 3 processes to connect to 127.0.0.1:\d+; giving up in [012] s "
        r"\(start_timeout is 2 s\)."
    )
    assert re.fullmatch(pattern, first[-1])  # rank 1 may be late


def test_a_rank_says_that_it_cannot_reach_the_store(unused_port, monkeypatch, caplog):
    monkeypatch.setattr(start_wait, "_FIRST", 0.2)
    for address, remark in (
        ("127.0.0.1", ""),
        ("no-such-host.invalid", r" \(.*: set MASTER_ADDR to a name or an address of the first machine\)"),
    ):
        environment = replace(
            detect_environment({}),
            launcher="srun",
            rank=1,
            world_size=2,
            num_nodes=2,
            node_rank=1,
            main_address=address,
            main_port=unused_port,
        )
        with pytest.raises(ProcessError, match=f"Rank 1 cannot reach the store of the run at {address}"):
            ProcessGroup(environment, CPU, start_timeout=timedelta(seconds=2)).join()
        expected = f"Waiting for rank 0, whose store is to be at {address}:{unused_port}{remark}; giving up in [12] s"
        assert re.match(expected, caplog.messages[0])
        caplog.clear()


def join_with_another_backend():
    settings = {"process_group_backend": "gloo"} if detect_environment().rank == 0 else {}
    group = ProcessGroup(detect_environment(), CPU, **settings)
    group.backend += "" if group.rank == 0 else "2"
    try:
        group.join()
    except ConfigError as error:
        return str(error)
    return None


def test_ranks_whose_backends_differ_are_named_before_any_waits():
    messages = run_ranks(join_with_another_backend, 2, timeout=60.0)
    host = re.escape(socket.gethostname())
    expected = rf"rank 0 on {host} has cpu \(gloo\), but rank 1 on {host} has cpu \(gloo2\)\. .*the same accelerator"
    assert all(re.search(expected, message) for message in messages)
