"""What a worker tells of its progress, and that it is read as it was written."""

import os
from time import monotonic

import pytest

from echelon.strategies.elastic.heartbeat import WARM_UP, Beat, Phase, make_records, read_record
from echelon.strategies.errors import ProcessError


def pretend(beat, seconds):
    """Let the newest beat be so many seconds old."""
    beat._time = monotonic() - seconds


def step(beat, number, seconds=0.0):
    beat.beat(Phase.TRAIN, number)
    if seconds:
        pretend(beat, seconds)
    beat.beat(Phase.BETWEEN, number + 1)


def warm(folder, local_rank=0, first=0):
    beat = Beat(folder, local_rank)
    beat.beat(Phase.START, first)
    for number in range(first, first + WARM_UP):
        step(beat, number)
    return beat


def test_nothing_is_known_before_the_first_beat(tmp_path):
    record = read_record(make_records(tmp_path, 1), 0)
    assert (record.time, record.phase, record.step, record.pid) == (0.0, Phase.START, None, None)


def test_each_worker_has_a_record_of_its_own(tmp_path):
    records = make_records(tmp_path, 3)
    Beat(tmp_path, 1).beat(Phase.TRAIN, 41)
    before = monotonic()
    Beat(tmp_path, 2).beat(Phase.EVALUATE, 7)
    one, two = read_record(records, 1), read_record(records, 2)
    assert (one.phase, one.step, one.num_beats, one.num_steps) == (Phase.TRAIN, 41, 1, 0)
    assert (two.phase, two.step, two.pid) == (Phase.EVALUATE, 7, os.getpid())
    assert one.time <= before <= two.time <= monotonic()
    assert read_record(records, 0).num_beats == 0


def test_steps_are_counted_from_the_first_of_the_process(tmp_path):
    records = make_records(tmp_path, 1)
    warm(tmp_path, first=100)
    assert read_record(records, 0).num_steps == WARM_UP
    assert read_record(records, 0).step == 100 + WARM_UP


def test_the_longest_recent_step_is_known_but_not_those_of_the_warm_up(tmp_path):
    records = make_records(tmp_path, 1)
    beat = Beat(tmp_path, 0)
    beat.beat(Phase.START, 0)
    step(beat, 0, seconds=100.0)
    assert read_record(records, 0).longest[Phase.TRAIN] == 0.0
    beat = warm(tmp_path)
    step(beat, 3, seconds=2.0)
    step(beat, 4, seconds=1.0)
    assert read_record(records, 0).longest[Phase.TRAIN] == pytest.approx(2.0, abs=0.5)
    for number in range(5, 100):
        step(beat, number)
    assert read_record(records, 0).longest[Phase.TRAIN] == pytest.approx(2.0, abs=0.5)
    for number in range(100, 200):
        step(beat, number)
    assert read_record(records, 0).longest[Phase.TRAIN] < 0.5


def test_the_longest_time_between_steps_is_never_forgotten(tmp_path):
    records = make_records(tmp_path, 1)
    beat = warm(tmp_path)
    pretend(beat, 30.0)
    for number in range(3, 300):
        step(beat, number)
    assert read_record(records, 0).longest[Phase.BETWEEN] == pytest.approx(30.0, abs=0.5)


def test_compiling_is_told_and_counts_for_no_step(tmp_path):
    records = make_records(tmp_path, 1)
    beat = warm(tmp_path)
    beat.beat(Phase.TRAIN, 3)
    beat.compiles(True)
    assert read_record(records, 0).is_compiling
    pretend(beat, 100.0)
    beat.compiles(False)
    beat.beat(Phase.BETWEEN, 4)
    record = read_record(records, 0)
    assert not record.is_compiling
    assert record.longest[Phase.TRAIN] < 10.0


def test_a_worker_that_the_agent_does_not_know_is_refused(tmp_path):
    with pytest.raises(ProcessError, match="No such file"):
        Beat(tmp_path, 0)
    make_records(tmp_path, 1)
    with pytest.raises(ProcessError, match="no record of local rank 1"):
        Beat(tmp_path, 1)
    (tmp_path / "beats").write_bytes(bytes(512))
    with pytest.raises(ProcessError, match="begins with 0.0"):
        Beat(tmp_path, 0)


def test_a_new_round_begins_with_blank_records(tmp_path):
    make_records(tmp_path, 1)
    warm(tmp_path)
    assert read_record(make_records(tmp_path, 2), 0).num_beats == 0
