"""A worker's report of its progress is read as it was written."""

import os
import threading
from time import monotonic

import pytest

from echelon.common.errors import ProcessError
from echelon.strategies.resilience.heartbeat import Beat, BeatRecord, Phase, make_records, read_record, set_until


def test_nothing_is_known_before_the_first_beat(tmp_path):
    record = read_record(make_records(tmp_path, 1), 0)
    assert (record.time, record.phase, record.step, record.pid) == (0.0, Phase.START, None, None)


def test_each_worker_has_a_record_of_its_own(tmp_path):
    records = make_records(tmp_path, 3)
    Beat(tmp_path, 1).beat(Phase.TRAIN, 41)
    before = monotonic()
    Beat(tmp_path, 2).beat(Phase.EVALUATE, 10**12)
    one, two = read_record(records, 1), read_record(records, 2)
    assert one[1:] == (Phase.TRAIN, 41, False, os.getpid(), None)
    assert two[1:] == (Phase.EVALUATE, 10**12, False, os.getpid(), None)
    assert one.time <= before <= two.time <= monotonic()
    assert read_record(records, 0) == BeatRecord(0.0)


def test_compiling_is_told(tmp_path):
    records = make_records(tmp_path, 1)
    beat = Beat(tmp_path, 0)
    beat.beat(Phase.TRAIN, 3)
    before = monotonic()
    beat.set_compiling(True)
    assert read_record(records, 0).is_compiling
    assert read_record(records, 0).time >= before
    beat.set_compiling(False)
    assert read_record(records, 0)[1:4] == (Phase.TRAIN, 3, False)


def test_a_worker_that_the_agent_does_not_know_is_refused(tmp_path):
    with pytest.raises(ProcessError, match="No such file"):
        Beat(tmp_path, 0)
    make_records(tmp_path, 1)
    with pytest.raises(ProcessError, match="no record for local rank 1"):
        Beat(tmp_path, 1)
    (tmp_path / "beats").write_bytes(bytes(512))
    with pytest.raises(ProcessError, match="must begin with .* got 0.0"):
        Beat(tmp_path, 0)


def test_a_new_round_begins_with_blank_records(tmp_path):
    make_records(tmp_path, 1)
    Beat(tmp_path, 0).beat(Phase.TRAIN, 3)
    assert read_record(make_records(tmp_path, 2), 0) == BeatRecord(0.0)


def test_a_worker_waits_while_its_agent_is_not_heard(tmp_path):
    records = make_records(tmp_path, 1)
    beat = Beat(tmp_path, 0)
    beat.wait_for_agent()  # no limit is set
    set_until(records, monotonic() - 1.0)
    waiting = threading.Thread(target=beat.wait_for_agent, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    set_until(records, monotonic() + 1000.0)
    waiting.join(60.0)
    assert not waiting.is_alive()
