"""The goodput ledger can be read, whole or damaged, and counts every second once."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.callbacks.goodput.ledger import (
    CATEGORIES,
    EndRecord,
    Ledger,
    LedgerFile,
    LedgerRecord,
    PeriodRecord,
    StartRecord,
    parse_record,
    read_ledger,
    to_line,
)
from echelon.callbacks.goodput.spans import Goodput, account_for_time, divide_duration, format_clock, goodput_of
from echelon.strategies.resilience.rounds import EndKind, RoundEnd

S = 1_000_000
"""A second."""


def start(
    time: int, step: int = 0, *, process: int | None = None, round: int = 0, ends: tuple[RoundEnd, ...] = ()
) -> StartRecord:
    """A round that begins at a second, its process (if nothing else is said) two before; resumed, if at a step."""
    return StartRecord(time * S, (time - 2 if process is None else process) * S, round, 1, step, step > 0, ends)


def period(time: int, seconds: int, first: int, last: int, **parts: int) -> PeriodRecord:
    """A period that ends at a second."""
    return PeriodRecord(time * S, seconds * S, first, last, {name: part * S for name, part in parts.items()})


def ended(time: int, kind: EndKind = "failure", step: int | None = None, round: int = 0) -> RoundEnd:
    return RoundEnd(round, time, kind, "it was killed", 1, step)


def end(time: int, status: str = "success") -> EndRecord:
    return EndRecord(time * S, status)


def write(path: Path, *records: LedgerRecord) -> Path:
    file = LedgerFile(path)
    for record in records:
        file.append(record)
    file.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "goodput.jsonl"


def seconds(goodput: Goodput) -> dict[str, float]:
    """What took any time, in seconds."""
    return {category: part / S for category, part in goodput.micros.items() if part}


def check(goodput: Goodput) -> None:
    """Every moment is counted once, and none is negative."""
    for before, after in zip(goodput.spans, goodput.spans[1:], strict=False):
        assert before.end == after.begin
    for span in goodput.spans:
        assert sum(span.micros.values()) == span.end - span.begin
        assert all(part >= 0 for part in span.micros.values())
    assert sum(goodput.micros.values()) == goodput.total
    of_rounds = [sum(one.micros.values()) for one in goodput.rounds]
    assert sum(of_rounds) == goodput.total


# --- accounts ---


def test_a_run_that_nobody_disturbed(path: Path) -> None:
    write(
        path,
        start(2),
        period(5, 3, 0, 1, start_up=3),
        period(15, 10, 1, 11, data_wait=2, checkpoint=1, validation=3),
        end(16),
    )
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 5, "data_wait": 2, "checkpoint": 1, "validation": 3, "productive": 5}
    assert goodput_of(goodput.micros) == 8 / 16
    assert (goodput.kept_steps, goodput.lost_steps) == (11, 0)
    assert goodput.rounds[0].end == "finished"


def test_steps_beyond_where_the_next_round_resumes_were_lost(path: Path) -> None:
    write(
        path,
        start(2),
        period(3, 1, 0, 1, start_up=1),
        period(12, 9, 1, 10),
        period(22, 10, 10, 20, data_wait=5),
        start(32, 14),
        period(52, 20, 14, 34),
    )
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    # of the last ten steps six were lost; when the process died is unknown, so it counts as down until the next one
    assert seconds(goodput) == {"start_up": 5, "productive": 9 + 2 + 20, "redone": 3, "data_wait": 5, "down": 8}
    assert (goodput.kept_steps, goodput.lost_steps) == (34, 6)
    assert [(one.first_step, one.last_step, one.lost_steps, one.end) for one in goodput.rounds] == [
        (0, 20, 6, "killed"),
        (14, 34, 0, "running or killed"),
    ]


def test_a_later_round_that_goes_back_further_takes_more(path: Path) -> None:
    write(
        path,
        start(2),
        period(12, 10, 0, 10),
        start(14, 8, process=12),
        period(18, 4, 8, 12),
        start(20, 4, process=18),
        period(36, 16, 4, 20),
    )
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert [one.lost_steps for one in goodput.rounds] == [6, 4, 0]
    assert seconds(goodput) == {"start_up": 6, "productive": 4 + 16, "redone": 6 + 4}


def test_a_failure_that_somebody_saw_is_work_lost_until_then_and_down_after(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), start(20, 10, process=18, round=1, ends=(ended(15),)))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 4, "productive": 10, "redone": 3, "down": 3}
    assert (goodput.rounds[0].end, goodput.rounds[0].cause) == ("failure of rank 1", "it was killed")


def test_steps_that_only_the_agent_knows_of_are_counted(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), start(20, 12, process=18, round=1, ends=(ended(16, step=14),)))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert (goodput.kept_steps, goodput.lost_steps) == (12, 2)
    assert seconds(goodput) == {"start_up": 4, "productive": 12, "redone": 2, "down": 2}
    assert goodput.rounds[0].last_step == 14


def test_the_agent_knows_why_better_than_a_process_that_was_torn_along(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), end(13, "failed"), start(20, 10, round=1, ends=(ended(14),)))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert goodput.rounds[0].cause == "it was killed"
    assert seconds(goodput) == {"start_up": 4, "productive": 11, "down": 5}


def test_a_hang_is_down_from_the_last_record_on(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), start(30, 10, process=28, round=1, ends=(ended(27, "hang"),)))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 4, "productive": 10, "down": 16}


def test_a_round_that_fails_before_its_first_step_was_starting(path: Path) -> None:
    write(path, start(2), start(20, process=18, round=1, ends=(ended(15),)))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 15 + 2, "down": 3}


def test_the_ends_of_another_job_are_not_taken_for_ours(path: Path) -> None:
    write(
        path,
        start(2, round=0),
        period(12, 10, 0, 10),
        start(20, 10, round=0),
        period(22, 2, 10, 12),
        start(30, 12, round=1, ends=(ended(23),)),
    )
    assert [one.end for one in account_for_time(read_ledger(path)).rounds] == [
        "killed",
        "failure of rank 1",
        "running or killed",
    ]


def test_a_run_that_went_back_inside_a_round(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), period(22, 10, 6, 16))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert (goodput.kept_steps, goodput.lost_steps) == (16, 4)
    assert seconds(goodput) == {"start_up": 2, "productive": 6 + 10, "redone": 4}


def test_a_run_begun_again_where_another_was_complete_loses_nothing_of_it(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), end(12), start(20), period(25, 5, 0, 5), end(25))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert (goodput.kept_steps, goodput.lost_steps) == (15, 0)
    write(path, start(30), period(32, 2, 0, 1), end(32, "failed"), start(40), period(42, 2, 0, 2))
    assert [one.lost_steps for one in account_for_time(read_ledger(path)).rounds] == [0, 0, 1, 0]


def test_a_gap_of_a_week_is_down_and_can_be_left_out(path: Path) -> None:
    week = 7 * 24 * 3600
    write(path, start(2), period(12, 10, 0, 10), end(12), start(week + 2, 10), period(week + 12, 10, 10, 20))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 4, "productive": 20, "down": week - 12}
    newer = account_for_time(read_ledger(path), since=1)
    check(newer)
    assert seconds(newer) == {"start_up": 2, "productive": 10}
    assert [one.round for one in newer.rounds] == [1]


def test_a_clock_that_is_behind_gives_no_negative_time(path: Path) -> None:
    write(path, start(1002), period(1012, 10, 0, 10), start(102, 10, process=100), period(112, 10, 10, 20))
    goodput = account_for_time(read_ledger(path))
    check(goodput)
    assert seconds(goodput) == {"start_up": 4, "productive": 20}


def test_a_process_that_ran_before_the_last_round_ended_starts_up_from_there_on(path: Path) -> None:
    write(path, start(2), period(12, 10, 0, 10), end(12), start(15, 10, process=1))
    assert seconds(account_for_time(read_ledger(path))) == {"start_up": 2 + 3, "productive": 10}


def test_parts_longer_than_their_period_are_cut() -> None:
    parts = {"checkpoint": 7 * S, "validation": 5 * S, "data_wait": 4 * S}
    assert divide_duration(10 * S, parts) == {
        "start_up": 0,
        "checkpoint": 7 * S,
        "validation": 3 * S,
        "data_wait": 0,
        "redone": 0,
        "productive": 0,
    }


def test_an_empty_ledger_has_an_empty_account() -> None:
    goodput = account_for_time(Ledger([]))
    assert (goodput.total, goodput.kept_steps, goodput_of(goodput.micros)) == (0, 0, 0.0)


def history(chance: random.Random) -> list[LedgerRecord]:
    """A ledger as a run may leave it: kills, ends, resumes, clocks that jump, agents that saw something or nothing."""
    time, step, number, records = chance.randrange(10**15), 0, 0, list[LedgerRecord]()
    ends: tuple[RoundEnd, ...] = ()
    for _ in range(chance.randrange(1, 8)):
        time += chance.choice([0, 1, -5, 300]) * chance.randrange(2 * S)
        began, time = max(0, time), max(0, time) + chance.randrange(5 * S)
        records.append(StartRecord(time, began, number, 1, step, step > 0, ends))
        saved = step
        for _ in range(chance.randrange(6)):
            duration, done = chance.randrange(10 * S), chance.randrange(5)
            names = ("start_up", "data_wait", "checkpoint", "validation", "redone")
            parts = {name: chance.randrange(duration + 1) for name in names if chance.random() < 0.3}
            time += duration
            records.append(PeriodRecord(time, duration, step, step + done, parts))
            step += done
            saved = chance.choice([saved, step])
        ends, number = (), number + 1
        if chance.random() < 0.3:
            time += chance.randrange(S)
            records.append(EndRecord(time, chance.choice(["interrupted", "failed"])))
        elif chance.random() < 0.5:
            noticed = max(0, time + chance.randrange(-S, 10 * S))
            seen = chance.choice([None, step, step + chance.randrange(3)])
            ends = (RoundEnd(number - 1, noticed / S, chance.choice(["failure", "hang"]), "", None, seen),)
        step = saved
    return records


def test_every_microsecond_of_any_ledger_is_counted_once_and_every_step_kept_once(path: Path) -> None:
    chance = random.Random(6)
    for _ in range(300):
        path.unlink(missing_ok=True)
        records = history(chance)
        write(path, *records)
        goodput = account_for_time(read_ledger(path))
        check(goodput)
        assert goodput.kept_steps == goodput.rounds[-1].last_step
        since = chance.randrange(len(goodput.rounds))
        check(account_for_time(read_ledger(path), since))
        lines = path.read_bytes().splitlines(keepends=True)
        damaged = [line if chance.random() < 0.8 else line[: chance.randrange(len(line))] for line in lines]
        path.write_bytes(b"".join(damaged))
        check(account_for_time(read_ledger(path)))


# --- the file ---

ALL: Mapping[str, LedgerRecord] = {
    "start": StartRecord(
        1_763_765_979_123_456, 1_763_765_977_000_001, 3, 8, 17, True, (ended(5, step=4), ended(7, round=2))
    ),
    "period": PeriodRecord(1_763_765_989_999_999, 4_999_999, 17, 19, {"data_wait": 1, "checkpoint": 123_457}),
    "end": EndRecord(1_763_765_999_000_001, "failed", 'RuntimeError: ¡out of "memory"!'),
}


@pytest.mark.parametrize("record", ALL.values(), ids=ALL)
def test_a_record_is_read_as_it_was_written_to_the_microsecond(record: LedgerRecord) -> None:
    assert parse_record(to_line(record)) == record


def test_the_end_of_a_round_as_the_agent_sees_it_is_taken_over() -> None:
    seen = RoundEnd(2, 1763765979.5, "hang", "no step for 30 s", rank=1, step=7)
    record = parse_record(to_line(start(2, ends=(seen,))))
    assert isinstance(record, StartRecord)
    assert record.ends == (seen,)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_last_line_is_left_out_and_the_next_writer_begins_a_new_one(path: Path, cut: int) -> None:
    write(path, start(2), period(5, 3, 0, 3))
    line = to_line(period(9, 4, 3, 7))
    with path.open("ab") as file:
        file.write(line[:cut])
    # without its newline only, it is whole
    known = [3] if cut != -1 else [3, 7]
    assert [one.last for one in read_ledger(path).rounds[0].periods] == known
    write(path, period(12, 3, 7, 9))
    ledger = read_ledger(path)
    assert [one.last for one in ledger.rounds[0].periods] == [*known, 9]
    assert ledger.num_skipped == (cut != -1)


def test_damaged_and_foreign_lines_are_skipped_and_counted(path: Path) -> None:
    good = [to_line(start(2)), to_line(period(5, 3, 0, 3))]
    flipped = good[1].replace(b'"to":3', b'"to":8')
    foreign = [b"\x00\xff\n", b"{}\n", b"[1, 2]\n", b"[" * 70_000 + b"\n", b'{"kind":"start"}\n', b"\n"]
    path.write_bytes(b"".join([to_line(end(1)), *good, flipped, *foreign]))
    ledger = read_ledger(path)
    assert [one.last for one in ledger.rounds[0].periods] == [3]
    assert ledger.num_skipped == 1 + 1 + 6  # the long one is read in two pieces, the empty one is skipped


def test_records_with_impossible_values_are_refused_though_their_checksum_is_right() -> None:
    whole = to_line(period(5, 3, 0, 3)).rpartition(b',"crc32"')[0]
    for wrong in (
        b'"to":-1',
        b'"to":1e400',
        b'"to":"3"',
        b'"to":null',
        b'"to":[]',
        b'"to":0,"from":2',
        b'"to":' + b"9" * 5000,
    ):
        body = whole.replace(b'"to":3', wrong) + b"}"
        assert parse_record(_sealed(body)) is None
    assert parse_record(_sealed(b'{"kind":["start"]}')) is None
    assert parse_record(_sealed(b'{"kind":"end","time":NaN,"status":"success","cause":""}')) is None
    assert parse_record(_sealed(b'{"kind":"end","time":1,"status":"great","cause":""}')) is None


def _sealed(body: bytes) -> bytes:
    """A line with the checksum that it should have."""
    import zlib

    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def test_text_of_a_ledger_cannot_move_the_cursor_of_a_terminal() -> None:
    record = parse_record(to_line(EndRecord(S, "failed", "\x1b[2Jgone\nnext " + "x" * 1000)))
    assert isinstance(record, EndRecord)
    assert record.cause.startswith(" [2Jgone next xxx")
    assert len(record.cause) == 300


def test_a_line_that_did_not_fit_is_an_error_and_the_next_one_is_whole(path: Path) -> None:
    file = LedgerFile(path)
    file.append(start(2))
    with limited(path.stat().st_size + 10), pytest.raises(OSError, match="No space left"):
        file.append(period(5, 3, 0, 3))
    file.append(period(9, 4, 3, 7))
    file.close()
    ledger = read_ledger(path)
    assert [one.last for one in ledger.rounds[0].periods] == [7]
    assert ledger.num_skipped == 1
    # the line that is missing had three steps in three seconds, and they are counted
    assert account_for_time(ledger).kept_steps == 7


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond this size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_writers_do_not_tear_each_others_lines(path: Path) -> None:
    first, second = LedgerFile(path), LedgerFile(path)
    first.append(start(2))
    for number in range(20):
        (first if number % 2 else second).append(period(3 + number, 1, number, number + 1))
    first.close()
    second.close()
    assert account_for_time(read_ledger(path)).kept_steps == 20
    assert os.stat(path).st_mode & 0o111 == 0


# --- words ---


def test_times_are_told_as_hours_minutes_and_seconds() -> None:
    assert [format_clock(0), format_clock(59_600_000), format_clock(3_661 * S), format_clock(360_000 * S)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "100:00:00",
    ]
    assert [format_clock(59_960_000, tenths=True), format_clock(1_250_000, tenths=True)] == ["0:01:00.0", "0:00:01.2"]


def test_all_categories_are_told_even_if_none_took_time(path: Path) -> None:
    write(path, start(2))
    assert tuple(account_for_time(read_ledger(path)).micros) == CATEGORIES
