"""When workers are restarted, after which delay, and when a run is given up, with which report."""

import pytest

from echelon.common.errors import ConfigError
from echelon.strategies.resilience.restart_policy import GiveUp, Restart, RestartPolicy
from echelon.strategies.resilience.rounds import RoundEnd, append_round, read_rounds

KILLED = "Rank 1 of 2 (process 4711) was killed by SIGKILL"


def ended(number, step, cause=KILLED, *, kind="failure", rank=1, is_consequence=False):
    return RoundEnd(number, 0.0, kind, cause, rank, step, is_consequence)


def delays(policy, steps, **details):
    return [policy.decide(ended(number, step, **details)).delay for number, step in enumerate(steps)]


def test_failures_with_progress_between_restart_at_once_until_the_budget_is_used_up():
    policy = RestartPolicy(10)
    assert delays(policy, range(10, 110, 10)) == [0.0] * 10
    assert policy.left == 0
    decision = policy.decide(ended(10, 110))
    assert isinstance(decision, GiveUp)
    assert "failed 11 times, and max_restarts=10" in decision.report
    assert [line.split()[:3] for line in decision.report.splitlines()[1:4]] == [
        ["round", "step", "rank"],
        ["0", "10", "1"],
        ["1", "20", "1"],
    ]


def test_a_budget_of_none_gives_up_at_the_first_failure():
    assert isinstance(RestartPolicy(0).decide(ended(0, 5)), GiveUp)


def test_the_delay_doubles_without_progress_and_falls_back_with_it():
    policy = RestartPolicy(100)
    # never the same step twice, and never one beyond the first
    assert delays(policy, range(50, 40, -1)) == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert delays(policy, [51, 51, 52]) == [0, 1, 0]
    assert delays(RestartPolicy(100, backoff=(0.5, 1.5)), [9, 8, 7, 6]) == [0, 0.5, 1, 1.5]


def test_a_failure_that_repeats_at_one_step_stops_with_what_to_do():
    policy = RestartPolicy(10)
    causes = [f"Rank {rank} of 4 (process {rank}) failed with ValueError: bad sample {rank}" for rank in range(3)]
    assert policy.decide(ended(0, 50, causes[0], rank=0)) == Restart(0.0)
    assert policy.decide(ended(1, 50, causes[1], rank=1)) == Restart(1.0)
    decision = policy.decide(ended(2, 50, causes[2], rank=2))
    assert isinstance(decision, GiveUp)
    assert decision.report.startswith("The run failed 3 times in a row after step 50 with the same cause")
    assert all(cause in decision.report for cause in causes)
    assert "look at the batch, the code and the memory of that step" in decision.report


def test_other_causes_or_steps_at_one_place_are_no_repetition():
    policy = RestartPolicy(10)
    for number, cause in enumerate([KILLED, KILLED, "Rank 0 of 2 (process 1) failed with ValueError: x", KILLED]):
        assert isinstance(policy.decide(ended(number, 50, cause)), Restart)
    assert isinstance(policy.decide(ended(4, 49)), Restart)
    assert isinstance(policy.decide(ended(5, 50)), Restart)


def test_hangs_repeat_whatever_their_seconds():
    policy = RestartPolicy(10)
    hangs = [f"Rank 1 (process 12) made no progress for {seconds} s" for seconds in (5.1, 5.25, 7)]
    decisions = [policy.decide(ended(number, 8, hang, kind="hang")) for number, hang in enumerate(hangs)]
    assert isinstance(decisions[1], Restart)
    assert "raise hang_timeout" in decisions[2].report
    assert "hang: Rank 1" in decisions[2].report


def test_what_fails_before_the_first_step_ever_is_tried_twice():
    cause = "Rank 0 of 2 (process 1) failed with ImportError: no module"
    policy = RestartPolicy(10)
    assert policy.decide(ended(0, None, cause, rank=None)) == Restart(0.0)
    decision = policy.decide(ended(1, None, cause, rank=None))
    assert "2 times in a row before the first step" in decision.report
    assert "start the run again" in decision.report


def test_a_start_that_fails_later_is_tried_like_a_step():
    policy = RestartPolicy(10)
    policy.decide(ended(0, 7))
    assert [type(policy.decide(ended(number, None))) for number in (1, 2, 3)] == [Restart, Restart, GiveUp]


@pytest.mark.parametrize("kind", ["membership", "preempted"])
def test_changes_of_the_nodes_cost_neither_budget_nor_time(kind):
    policy = RestartPolicy(1)
    assert delays(policy, [5] * 20, kind=kind) == [0.0] * 20
    assert policy.left == 1
    assert policy.decide(ended(20, 6)) == Restart(0.0)


def test_consequences_of_failures_elsewhere_cost_no_budget():
    policy = RestartPolicy(1)
    assert delays(policy, range(20), is_consequence=True) == [0.0] * 20
    assert policy.left == 1


def test_nodes_that_only_blame_each_other_come_to_an_end():
    policy = RestartPolicy(3)
    assert delays(policy, [5] * 3, is_consequence=True) == [0.0, 1.0, 2.0]
    decision = policy.decide(ended(3, 5, is_consequence=True))
    assert "4 times without a step in between" in decision.report
    assert "check that the nodes reach each other" in decision.report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_restarts": -1}, "max_restarts must be >= 0, got -1"),
        ({"max_restarts": 1, "backoff": (2.0, 1.0)}, r"backoff must be .* got \(2.0, 1.0\)"),
        ({"max_restarts": 1, "same_step_limit": 0}, "same_step_limit must be >= 1, got 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RestartPolicy(**arguments)


def test_the_ends_of_rounds_are_kept_in_order(tmp_path):
    assert read_rounds(tmp_path) == []
    ends = [ended(0, None, "line\nbreak"), ended(1, 5, kind="hang", rank=None, is_consequence=True)]
    for end in ends:
        append_round(tmp_path, end)
    assert read_rounds(tmp_path) == ends
