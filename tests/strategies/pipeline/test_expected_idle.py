"""The idle time that a timeline expects is that of what its ranks did."""

import pytest

from echelon.strategies.pipeline.schedule import Schedule
from echelon.strategies.pipeline.timeline import StageSpan, WindowTimeline


@pytest.mark.parametrize(
    ("name", "stages", "in_halves", "whole"),
    [("gpipe", 1, 1 / 5, 1 / 5), ("1f1b", 1, 1 / 5, 1 / 5), ("zbv_zero_bubble", 2, 1 / 25, 1 / 7)],
)
def test_a_schedule_of_halves_whose_backward_is_whole_waits_longer(name, stages, in_halves, whole):
    schedule = Schedule(name, 2, stages)
    for doing, expected in (("backward of weights", in_halves), ("backward", whole)):
        spans = [StageSpan(0, doing, 0, 0, 0.0, 1.0)]
        window = WindowTimeline(schedule, 4, is_simple=False, seconds=1.0, spans=spans)
        assert window.expected_idle_share == pytest.approx(expected)
