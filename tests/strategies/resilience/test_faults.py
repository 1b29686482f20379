"""Chaos: what its text means, what is refused, and that an event is marked once for all workers."""

import dataclasses
import os
import pickle
import threading
import time

import pytest
from torch.distributed import HashStore

from echelon.common.errors import ConfigError
from echelon.strategies.distributed.noticeboard import Noticeboard
from echelon.strategies.resilience.fault_marks import FileMarks, NoticeMarks
from echelon.strategies.resilience.faults import Chaos, FaultEvent, RandomFaults


def test_the_example_of_the_issue_is_read():
    chaos = Chaos("kill:rank=1@step=50, stop:rank=0@step=80, leave:node=1@step=120")
    assert chaos.events == (
        FaultEvent("kill", "rank", 1, "step", 50),
        FaultEvent("stop", "rank", 0, "step", 80),
        FaultEvent("leave", "node", 1, "step", 120),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        chaos.events = ()
    assert pickle.loads(pickle.dumps(chaos)) == chaos
    assert hash(chaos) == hash(Chaos(str(chaos)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill:rank=1@step=50, stop:rank=0@step=80, leave:node=1@step=120",
        "exit:rank=0+code=3+delay=0.25@checkpoint=2",
        "slow:node=2+ms=0.0000001@start=0",
        "raise:rank=3@validation=1, hang:rank=0@snapshot=4, lose:node=1+delay=12@start=7",
        "kill:rank=0@step=5, kill:rank=0@step=5",
        "random:seed=3@seconds=5-10",
        "kill:node=1@step=1, random:seed=0+actions=leave/slow/kill@seconds=0.5-100000000",
    ],
)
def test_the_text_of_chaos_is_read_as_the_same(text):
    chaos = Chaos(text)
    assert str(chaos) == text
    assert Chaos(str(chaos)) == chaos
    assert bool(chaos) == bool(text)


def test_events_are_separated_by_commas_or_spaces():
    apart = Chaos(" kill:rank=1@step=5,stop:rank=0@step=8\n\thang:rank=2@start=0, ")
    assert str(apart) == "kill:rank=1@step=5, stop:rank=0@step=8, hang:rank=2@start=0"


def test_the_defaults_are_not_written():
    assert str(Chaos("exit:rank=0+code=1+delay=0@step=7")) == "exit:rank=0@step=7"
    assert str(Chaos("random:seed=3+actions=kill/stop@seconds=5")) == "random:seed=3@seconds=5-5"


def test_random_faults_are_written_as_text_too():
    chaos = Chaos.random(7, every=(0.5, 2.0), actions=("kill", "exit"))
    assert str(chaos) == "random:seed=7+actions=kill/exit@seconds=0.5-2"
    assert chaos.at_random == RandomFaults(7, 0.5, 2.0, ("kill", "exit"))
    assert Chaos(str(chaos)) == chaos
    assert str(Chaos.random(3)) == "random:seed=3@seconds=5-10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:rank=1@step=5", "'kil' in 'kil:rank=1@step=5' is not a valid action; .* Did you mean 'kill'?"),
        ("kill:rnak=1@step=5", "'rnak' in .* is not a valid target; .* Did you mean 'rank'?"),
        ("kill:rank=1@stp=5", "'stp' in .* is not a valid point; .* Did you mean 'step'?"),
        ("kill:rank=1+dleay=1@step=5", "'dleay' in .* is not a valid option of kill; .* Did you mean 'delay'?"),
        ("kill:rank=1+code=1@step=5", "'code' in .* is not a valid option of kill; .* Choose one of: delay"),
        ("hang:rank=1+ms=1@step=5", "'ms' in .* hang has no options; leave it out"),
        ("kill@step=5", "'kill@step=5' has no target; write 'ACTION:rank=R@step=N'"),
        ("kill:rank=1", "'kill:rank=1' has no point; write"),
        ("kill:1@step=5", "'1' in 'kill:1@step=5' is not a valid target; write"),
        ("kill:rank=one@step=5", "rank in .* must be a whole number >= 0, got one"),
        ("kill:rank=-1@step=5", "rank in .* must be a whole number >= 0, got -1"),
        ("kill:rank=1@step=0", "step in .* must be a whole number >= 1, got 0"),
        ("exit:rank=1+code=256@step=5", "code in .* must be a whole number from 0 to 255, got 256"),
        ("slow:rank=1+ms=-5@step=5", "ms in .* must be a number such as 0.5, got -5"),
        ("random@seconds=5-10", "'random@seconds=5-10' has no seed; write 'random:seed=S@seconds=A-B'"),
        ("random:seed=1@second=5-10", "'second' in .* is not a valid point; .* Did you mean 'seconds'?"),
        ("random:seed=1+actions=kill/stp@seconds=5", "'stp' in .* is not a valid action; .* Did you mean 'stop'?"),
        ("random:sed=1@seconds=5", "'sed' in .* is not a valid option; .* Did you mean 'seed'?"),
        ("random:seed=1@seconds=10-5", "seconds in .* must increase, got 10-5; write 5-10"),
        (
            "random:seed=1@seconds=5 random:seed=2@seconds=5",
            "must have one random entry, got 'random:seed=1@seconds=5' and .*; keep one",
        ),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"^chaos:? {message}"):
        Chaos(text)


def test_random_faults_are_drawn_alike_on_all_ranks_and_differ():
    faults = Chaos.random(3, every=(5.0, 10.0)).at_random
    drawn = [faults.draw(number, 4) for number in range(200)]
    assert drawn == [Chaos.random(3).at_random.draw(number, 4) for number in range(200)]
    assert all(5.0 <= seconds <= 10.0 for seconds, _, _ in drawn)
    assert {(action, rank) for _, action, rank in drawn} == {(a, r) for a in ("kill", "stop") for r in range(4)}
    assert drawn != [Chaos.random(4).at_random.draw(number, 4) for number in range(200)]


@pytest.mark.parametrize("kind", ["files", "store"])
def test_a_name_is_claimed_once(tmp_path, kind):
    store = HashStore()

    def marks():  # each worker has its own
        return FileMarks(tmp_path) if kind == "files" else NoticeMarks(Noticeboard(store, "run"))

    assert marks().time_of("random-0") is None
    before = time.time()
    assert marks().claim("random-0")
    assert before - 0.1 < marks().time_of("random-0") < time.time() + 0.1
    claims = [marks().claim("random-0") for _ in range(3)]
    assert claims == [False] * 3
    assert marks().time_of("random-0") < time.time() + 0.1
    assert marks().claim("event-0")
    if kind == "files":
        assert sorted(os.listdir(tmp_path)) == ["fault-event-0", "fault-random-0"]


@pytest.mark.parametrize("kind", ["files", "store"])
def test_of_many_that_claim_at_once_one_gets_it(tmp_path, kind):
    marks = FileMarks(tmp_path) if kind == "files" else NoticeMarks(Noticeboard(HashStore(), "run"))
    names = [f"event-{number}" for number in range(50)]
    won = []
    threads = [
        threading.Thread(target=lambda: won.extend(name for name in names if marks.claim(name))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(names)
