"""Which worker hangs: judged from hand-set clocks and records, and from real processes, stopped or debugged."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from echelon.common.errors import ConfigError
from echelon.common.proc_status import Activity, look_at
from echelon.strategies.resilience import heartbeat
from echelon.strategies.resilience.hang_detection import Hang, Limits, Standing, Watch, read_clocks
from echelon.strategies.resilience.heartbeat import Beat, Phase

PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def tell(watch, rank, phase, step, time, *, is_compiling=False):
    """Set the record of a worker, as if it had made a beat at that time."""
    start = (rank + 1) * heartbeat._RECORD
    watch._records[start + heartbeat._TIME] = time
    watch._records[start + heartbeat._PLACE] = step * heartbeat._PHASES + phase
    watch._records[start + heartbeat._IS_COMPILING] = is_compiling


def begun(watch, size=1, step=0):
    """Look at workers that begin at that step, a second before all that follows."""
    for rank in range(size):
        tell(watch, rank, Phase.START, step, 99.0)
    assert watch.look(99.0) is None
    return watch


def first_hang(watch, start, end, **details):
    """Look from one second to another; return when a hang was found first, and the hang."""
    now = start
    while now <= end:
        hang = watch.look(now, **details)
        if hang is not None:
            return now, hang
        now += watch.interval
    return None


def one(tmp_path, phase=Phase.TRAIN, step=50, limits=None, **seen):
    """Return the watch of one worker, which had silences of these seconds before, by the names of phases."""
    watch = begun(Watch(tmp_path, 1, limits))
    for name, seconds in seen.items():
        watch._pace.note(Phase[name], seconds, step)
    tell(watch, 0, phase, step, 100.0)
    return watch


@pytest.mark.parametrize(
    ("phase", "longest", "limit"),
    [
        (Phase.TRAIN, {"TRAIN": 0.01}, 5.0),
        (Phase.TRAIN, {"TRAIN": 2.0}, 40.0),
        (Phase.TRAIN, {"TRAIN": 1000.0}, 1800.0),
        (Phase.BETWEEN, {"TRAIN": 50.0}, 60.0),
        (Phase.BETWEEN, {"BETWEEN": 10.0}, 200.0),
        (Phase.EVALUATE, {}, 60.0),
        (Phase.EVALUATE, {"EVALUATE": 5.0}, 100.0),
        (Phase.START, {}, 1800.0),
        (Phase.END, {}, 1800.0),
    ],
)
def test_what_is_allowed_follows_what_was_measured(tmp_path, phase, longest, limit):
    watch = one(tmp_path, phase, **longest)
    when, hang = first_hang(watch, 100.0, 2000.0)
    assert limit < when - 100.0 <= limit + 1.0
    assert hang == Hang((0,), (None,), phase, 50, when - 100.0, limit, is_stopped=False)


def test_progress_is_no_hang(tmp_path):
    watch = one(tmp_path)
    for second in range(100, 200):
        tell(watch, 0, Phase.TRAIN, second, float(second - 4))
        assert watch.look(float(second)) is None


@pytest.mark.parametrize(("first", "step", "is_compiling"), [(0, 2, False), (48, 50, False), (0, 50, True)])
def test_the_first_steps_and_compilation_may_take_long(tmp_path, first, step, is_compiling):
    watch = begun(Watch(tmp_path, 1), step=first)
    tell(watch, 0, Phase.TRAIN, step, 100.0, is_compiling=is_compiling)
    limit = 1800.0 if is_compiling else 300.0
    assert first_hang(watch, 100.0, 100.0 + limit) is None
    assert first_hang(watch, 100.0 + limit, 102.0 + limit)


def test_a_step_is_allowed_twenty_times_what_the_longest_of_the_last_ones_took(tmp_path):
    watch = begun(Watch(tmp_path, 1))
    for step in range(40):
        started = 100.0 + 4 * step
        tell(watch, 0, Phase.TRAIN, step, started)
        assert first_hang(watch, started, started + 2.75) is None
        tell(watch, 0, Phase.BETWEEN, step + 1, started + 3.0)
        assert first_hang(watch, started + 3.0, started + 3.5) is None
    tell(watch, 0, Phase.TRAIN, 40, 260.0)
    when, hang = first_hang(watch, 260.0, 400.0)
    assert hang.limit == 40.0  # it was seen two seconds after its begin, not three
    tell(watch, 0, Phase.TRAIN, 41, when)
    for step in range(42, 180):
        when += 0.5
        tell(watch, 0, Phase.TRAIN, step, when)
        assert watch.look(when) is None
    assert first_hang(watch, when, 1000.0)[1].limit == 5.0


def test_waiting_for_another_is_no_long_step(tmp_path):
    watch = begun(Watch(tmp_path, 2), 2)
    tell(watch, 0, Phase.BETWEEN, 50, 100.0)
    tell(watch, 1, Phase.TRAIN, 50, 100.0)
    assert first_hang(watch, 100.0, 150.0) is None
    for rank, phase in ((0, Phase.TRAIN), (0, Phase.BETWEEN), (1, Phase.BETWEEN)):
        tell(watch, rank, phase, 50 + (phase is Phase.BETWEEN), 150.5)
        assert watch.look(150.5) is None
    for rank in (0, 1):
        tell(watch, rank, Phase.TRAIN, 51, 151.0)
    assert first_hang(watch, 151.0, 200.0)[1].limit == 5.0
    for rank in (0, 1):
        tell(watch, rank, Phase.BETWEEN, 52, 200.0)
    watch.look(200.0)
    assert first_hang(watch, 200.0, 3000.0)[1].limit == 1000.0


def test_a_worker_without_any_beat_may_take_as_long(tmp_path):
    watch = Watch(tmp_path, 2)
    assert first_hang(watch, 100.0, 1900.0) is None
    _, hang = first_hang(watch, 1900.0, 1902.0)
    assert hang.ranks == (0, 1)
    assert "before training" in hang.describe()


@pytest.mark.parametrize(
    ("timeout", "phase", "limit"),
    [(2.0, Phase.TRAIN, 2.0), (90.0, Phase.TRAIN, 90.0), (2.0, Phase.BETWEEN, 60.0), (90.0, Phase.BETWEEN, 90.0),
     (4000.0, Phase.START, 4000.0)],
)  # fmt: skip
def test_the_users_timeout_counts_for_steps_and_is_the_least_elsewhere(tmp_path, timeout, phase, limit):
    watch = one(tmp_path, phase, limits=Limits(timeout=timeout), TRAIN=10.0)
    when, hang = first_hang(watch, 100.0, 5000.0)
    assert hang.limit == limit
    assert limit < when - 100.0 <= limit + 1.0


def test_those_that_wait_for_a_slower_one_do_not_hang_and_it_does_once_it_is_overdue(tmp_path):
    watch = begun(Watch(tmp_path, 3), 3)
    tell(watch, 0, Phase.BETWEEN, 50, 100.0)  # saves
    tell(watch, 1, Phase.TRAIN, 50, 100.0)
    tell(watch, 2, Phase.TRAIN, 50, 100.0)
    when, hang = first_hang(watch, 100.0, 300.0)
    assert hang.ranks == (0,)
    assert 60.0 < when - 100.0 <= 61.0


def test_those_that_wait_for_one_that_compiles_do_not_hang(tmp_path):
    watch = begun(Watch(tmp_path, 2), 2)
    tell(watch, 0, Phase.TRAIN, 50, 100.0)
    tell(watch, 1, Phase.TRAIN, 50, 100.0, is_compiling=True)
    assert first_hang(watch, 100.0, 1000.0) is None


@pytest.mark.parametrize(("behind", "culprits"), [(1, (5,)), (0, (4, 5, 6))])
def test_the_one_that_is_a_step_behind_is_the_culprit_else_all_are(tmp_path, behind, culprits):
    watch = begun(Watch(tmp_path, 3), 3)
    watch.follow({4: 0, 5: 0, 6: 0})
    for rank in range(3):
        tell(watch, rank, Phase.TRAIN, 50 - behind * (rank == 1), 100.0)
    when, hang = first_hang(watch, 100.0, 110.0)
    assert (when, hang.ranks, hang.step) == (106.0, culprits, 50 - behind)
    ranks, unknown = ", ".join(map(str, culprits)), ", ".join(["unknown"] * len(culprits))
    assert hang.describe() == (
        f"Rank {ranks} (process {unknown}) made no progress for 6.0 s, in a step, after step {50 - behind}; "
        "the limit there is 5.0 s"
    )


def test_silence_counts_again_when_this_process_did_not_run(tmp_path):
    watch = one(tmp_path)
    assert first_hang(watch, 100.0, 104.0) is None
    when, _ = first_hang(watch, 700.0, 710.0)
    assert 705.0 < when <= 706.5


def test_silence_counts_again_when_the_machine_was_suspended(tmp_path):
    watch = one(tmp_path)
    assert first_hang(watch, 100.0, 104.0) is None
    when, _ = first_hang(watch, 105.0, 115.0, suspended=3600.0)
    assert 110.0 < when <= 111.5


def test_the_clocks_are_those_of_beats(tmp_path):
    now, suspended = read_clocks()
    watch = Watch(tmp_path, 1)
    heartbeat.Beat(tmp_path, 0).beat(Phase.START, 0)
    assert now <= watch.records()[0].time <= read_clocks()[0]
    assert suspended >= -0.1


# --- what uses the processor ---


def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


@pytest.mark.parametrize(("phase", "seconds"), [(Phase.BETWEEN, 60.0), (Phase.EVALUATE, 60.0), (Phase.TRAIN, 5.0)])
def test_who_works_between_steps_does_not_hang_before_it_is_idle(tmp_path, phase, seconds):
    watch = one(tmp_path, phase)
    watch.follow({0: os.getpid()})
    assert first_hang(watch, 100.0, 104.0) is None
    work(0.2)
    when, hang = first_hang(watch, 105.0, 200.0)
    assert when == (105.0 if phase in (Phase.BETWEEN, Phase.EVALUATE) else 100.0) + seconds + 1.0
    assert hang.silent == when - 100.0


def test_a_processor_that_is_hardly_used_is_idle():
    activity = Activity(100.0, 7.0)
    for second in range(101, 200):
        activity.note(float(second), 7.0 + 0.005 * (second - 100))
    assert activity.newest == 100.0
    activity.note(200.0, 8.1)
    assert activity.newest == 200.0


def test_work_without_end_is_a_hang_too(tmp_path):
    watch = one(tmp_path, Phase.BETWEEN, limits=Limits(start=62.0))
    watch.follow({0: os.getpid()})
    assert first_hang(watch, 100.0, 130.0) is None
    work(0.4)
    when, _ = first_hang(watch, 131.0, 300.0)
    assert when == 163.0


# --- several nodes ---


@pytest.mark.parametrize(
    ("elsewhere", "is_hang"),
    [
        (Standing(50, 1, is_overdue=True), True),
        (Standing(50, 1, is_overdue=False), False),  # compiles, perhaps
        (Standing(50, 0, is_overdue=True), False),  # its own agent reports it
        (Standing(49, 1, is_overdue=False), False),
        (Standing(51, 0, is_overdue=False), True),
        (Standing(-1, 0, is_overdue=False), False),
    ],
)
def test_another_node_that_is_behind_is_waited_for(tmp_path, elsewhere, is_hang):
    watch = one(tmp_path)
    assert bool(first_hang(watch, 100.0, 110.0, elsewhere=[elsewhere])) is is_hang


def test_a_node_stands_where_its_rearmost_workers_do(tmp_path):
    watch = Watch(tmp_path, 2)
    assert watch.standing(98.0) == Standing(-1, 0, is_overdue=False)
    begun(watch, 2)
    watch.look(100.0)
    tell(watch, 0, Phase.TRAIN, 50, 100.0)
    tell(watch, 1, Phase.BETWEEN, 51, 100.0)
    assert watch.standing(101.0) == Standing(50, 1, is_overdue=False)
    assert watch.standing(106.0) == Standing(50, 1, is_overdue=True)
    tell(watch, 0, Phase.END, 51, 106.0)
    assert watch.standing(106.0) == Standing(51, 0, is_overdue=False)
    tell(watch, 1, Phase.END, 51, 106.0)
    assert watch.standing(106.0) == Standing(51, 2, is_overdue=False)


# --- real processes ---


@contextmanager
def process():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("phase", Phase)
def test_a_stopped_process_is_found_wherever_it_is_and_the_others_are_not_to_blame(tmp_path, phase):
    watch = Watch(tmp_path, 2)
    with process() as running, process() as stopped:
        watch.follow({0: running, 1: stopped})
        begun(watch, 2)
        tell(watch, 0, Phase.TRAIN, 50, 100.0)
        tell(watch, 1, phase, 50, 100.0)
        stop(stopped)
        when, hang = first_hang(watch, 101.0, 120.0)
        assert 5.0 < when - 100.0 <= 7.0
        assert (hang.ranks, hang.pids, hang.phase, hang.is_stopped) == ((1,), (stopped,), phase, True)
        assert f"Rank 1 (process {stopped}) has been stopped by a signal" in hang.describe()


def test_one_that_goes_on_is_no_longer_stopped(tmp_path):
    watch = one(tmp_path, Phase.BETWEEN)
    with process() as pid:
        watch.follow({0: pid})
        stop(pid)
        assert first_hang(watch, 101.0, 105.0) is None
        os.kill(pid, signal.SIGCONT)
        os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
        assert first_hang(watch, 105.0, 120.0) is None


def test_a_stop_before_the_first_beat_is_found(tmp_path):
    watch = Watch(tmp_path, 1)
    with process() as pid:
        watch.follow({0: pid})
        stop(pid)
        assert first_hang(watch, 100.0, 110.0)[1].ranks == (0,)


def test_one_that_has_ended_is_not_waited_for(tmp_path):
    watch = Watch(tmp_path, 2)
    with process() as pid, process() as other:
        watch.follow({0: pid, 1: other})
        begun(watch, 2)
        tell(watch, 0, Phase.TRAIN, 50, 100.0)
        tell(watch, 1, Phase.TRAIN, 49, 100.0)
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        assert look_at(other).state == "ended"
        assert first_hang(watch, 100.0, 110.0)[1].ranks == (0,)
    assert look_at(other).state == "ended"
    assert watch.standing(110.0) is None
    assert watch.look(110.0) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace is called as Linux has it")
def test_one_that_is_debugged_is_not_a_hang_and_silence_counts_again_after_it(tmp_path):
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    watch = Watch(tmp_path, 2)
    with process() as debugged, process() as waiting:
        watch.follow({0: debugged, 1: waiting})
        begun(watch, 2)
        tell(watch, 0, Phase.TRAIN, 50, 100.0)
        tell(watch, 1, Phase.TRAIN, 50, 100.0)
        if ptrace(PTRACE_ATTACH, debugged, None, None) != 0:
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(debugged, 0)
        assert look_at(debugged).state == "runs"  # by a debugger, not by a signal
        assert first_hang(watch, 100.0, 200.0) is None
        assert ptrace(PTRACE_DETACH, debugged, None, None) == 0
        when, hang = first_hang(watch, 201.0, 220.0)
        assert 1.0 < when - 200.0 <= 7.0
        assert hang.ranks == (0, 1)


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"timeout must be > 0, got 0.0"):
        Limits(timeout=0.0)


def test_steps_that_were_done_between_two_looks_count_as_done(tmp_path):
    watch = Watch(tmp_path, 1)
    beat = Beat(tmp_path, 0)
    beat.begin(20)
    beat.beat(Phase.TRAIN, 29)
    began = time.monotonic()
    assert watch.look(began) is None
    hangs = [watch.look(began + seconds) for seconds in range(1, 8)]
    assert hangs[-1] is not None and hangs[-1].step == 29
