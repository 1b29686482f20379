"""Silences of workers: which of them count, and for how long."""

from echelon.strategies.resilience.hang_detection import Pace
from echelon.strategies.resilience.heartbeat import BeatRecord, Phase


def test_a_silence_counts_once_another_beat_has_followed():
    pace = Pace()
    for now in (10.0, 11.0, 12.0):
        pace.see(now, BeatRecord(10.0, Phase.TRAIN, 5))
        assert pace.longest(Phase.TRAIN) == 0.0
    pace.see(12.5, BeatRecord(12.2, Phase.BETWEEN, 6))
    assert pace.longest(Phase.TRAIN) == 2.0
    assert pace.longest(Phase.BETWEEN) == 0.0


def test_a_beat_that_others_did_not_wait_for_before_counts_from_then():
    pace = Pace()
    pace.see(10.0, BeatRecord(10.0, Phase.BETWEEN, 5))
    pace.see(49.0, BeatRecord(10.0, Phase.BETWEEN, 5))
    pace.see(50.0, BeatRecord(10.0, Phase.TRAIN, 5))
    pace.see(51.0, BeatRecord(10.0, Phase.TRAIN, 5))
    pace.see(52.0, BeatRecord(51.5, Phase.BETWEEN, 6))
    assert pace.longest(Phase.BETWEEN) == 39.0
    assert pace.longest(Phase.TRAIN) == 2.0


def test_a_silence_that_was_interrupted_does_not_count():
    pace = Pace()
    pace.see(10.0, BeatRecord(10.0, Phase.TRAIN, 5))
    pace.see(40.0, BeatRecord(10.0, Phase.TRAIN, 5))
    pace.see(40.0, None)
    pace.see(41.0, BeatRecord(40.5, Phase.BETWEEN, 6))
    assert pace.longest(Phase.TRAIN) == 0.0


def test_the_longest_step_is_that_of_the_last_fifty_to_hundred():
    pace = Pace()
    pace.note(Phase.TRAIN, 3.0, 7)
    pace.note(Phase.BETWEEN, 9.0, 7)
    for step in range(8, 100):
        pace.note(Phase.TRAIN, 1.0, step)
        assert pace.longest(Phase.TRAIN) == 3.0
    pace.note(Phase.TRAIN, 1.0, 100)
    assert pace.longest(Phase.TRAIN) == 1.0
    assert pace.longest(Phase.BETWEEN) == 9.0
    pace.note(Phase.TRAIN, 0.5, 1000)
    assert pace.longest(Phase.TRAIN) == 0.5
    pace.note(Phase.TRAIN, 0.25, 3)  # rolled back
    assert pace.longest(Phase.TRAIN) == 0.25
