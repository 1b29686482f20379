"""A host that runs ahead of its device reports what the device has completed, and waits before it is too far ahead."""

from types import SimpleNamespace

import pytest
import torch

from echelon.callbacks.helpers.device_queue import DeviceQueue

GPU = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    """A device that completes its work when it is told to, or when somebody waits for it."""
    given = []

    class Event:
        def __init__(self, blocking=False):
            self.is_done = False

        def record(self):
            given.append(self)

        def query(self):
            return self.is_done

        def synchronize(self):
            for event in given[: given.index(self) + 1]:
                event.is_done = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return SimpleNamespace(given=given, Event=Event)


def test_steps_that_the_device_has_not_completed_are_not_reported(device):
    queue = DeviceQueue(GPU, 10)
    queue.give(11)
    queue.give(12)
    assert queue.completed == 10
    device.given[0].is_done = True
    queue.give(13)
    assert queue.completed == 11


def test_the_host_is_at_most_three_steps_ahead(device):
    queue = DeviceQueue(GPU, 0)
    for step in range(1, 101):
        queue.give(step)
        assert step - queue.completed <= 3


def test_a_device_that_hangs_holds_the_host_at_the_next_step_but_two(device, monkeypatch):
    def hang(self):
        raise TimeoutError

    monkeypatch.setattr(device.Event, "synchronize", hang)
    queue = DeviceQueue(GPU, 0)
    for step in (1, 2, 3):
        queue.give(step)
    with pytest.raises(TimeoutError):
        queue.give(4)
    assert queue.completed == 0
