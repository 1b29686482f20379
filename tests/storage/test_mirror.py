"""Mirror: what a run writes into a local folder reaches the store, and comes back where another process continues."""

import secrets
import shutil
import time

import pytest
from proxy import Fault

from echelon.common.errors import StoreError
from echelon.common.storage import Mirror, as_path


@pytest.fixture
def home():
    return as_path(f"memory://mirrors-{secrets.token_hex(4)}/run")


def contents(home):
    return {str(path.relative_to(home)): path.read_bytes() for path in home.find()}


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_what_changed_is_sent_again(tmp_path, home):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub" / "b.txt").write_text("b")
    for name in (".hidden", "half.tmp"):
        (tmp_path / name).write_text("stays here")
    mirror = Mirror(tmp_path, home)
    mirror.send()
    assert contents(home) == {"a.txt": b"a", "sub/b.txt": b"b"}
    (home / "a.txt").write_text("of another")
    (tmp_path / "sub" / "b.txt").write_text("more of b")
    mirror.send()
    assert contents(home) == {"a.txt": b"of another", "sub/b.txt": b"more of b"}


def test_the_thread_sends_at_intervals_when_woken_and_at_the_end(tmp_path, home):
    mirror = Mirror(tmp_path, home, every=0.05)
    mirror.start()
    (tmp_path / "a").write_text("1")
    wait_until(lambda: contents(home) == {"a": b"1"})
    mirror.close(lambda: 60)
    mirror = Mirror(tmp_path, home, every=3600)
    mirror.start()
    (tmp_path / "b").write_text("2")
    mirror.wake()
    wait_until(lambda: "b" in contents(home))
    (tmp_path / "b").write_text("22")
    mirror.close(lambda: 60)
    assert contents(home) == {"a": b"1", "b": b"22"}


def test_a_file_that_grows_is_not_sent_all_the_time(tmp_path, home):
    (tmp_path / "a").write_text("1")
    mirror = Mirror(tmp_path, home)
    mirror.send()
    mirror._copied["a"].due = time.monotonic() + 3600  # as if that had taken minutes
    (tmp_path / "a").write_text("12")
    mirror.send(all_due=False)
    assert contents(home) == {"a": b"1"}
    mirror.send()
    assert contents(home) == {"a": b"12"}


def test_a_machine_that_continues_gets_what_it_needs(tmp_path, home):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "samples").mkdir(parents=True)
    (here / "plots").mkdir()
    for name in ("metrics.csv", "samples/attempt_0001", "plots/large.png", "events.out.tfevents.1"):
        (here / name).write_text(name)
    Mirror(here, home).send()
    mirror = Mirror(there, home, names_only=("events.*", "samples/*"))
    mirror.fetch()
    files = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    del files[".mirrored.json"]
    assert files == {"metrics.csv": "metrics.csv", "samples/attempt_0001": "", "events.out.tfevents.1": ""}
    (there / "metrics.csv").write_text("continued")
    mirror.send()
    assert contents(home)["metrics.csv"] == b"continued"
    assert contents(home)["samples/attempt_0001"] == b"samples/attempt_0001"
    # and back: the first machine's file is older than the store's
    Mirror(here, home).fetch()
    assert (here / "metrics.csv").read_text() == "continued"


def test_what_a_killed_process_had_not_sent_is_kept_where_it_lies(tmp_path, home):
    (tmp_path / "metrics.csv").write_text("1")
    Mirror(tmp_path, home).send()
    (tmp_path / "metrics.csv").write_text("1 and 2")
    (tmp_path / "new").write_text("new")
    mirror = Mirror(tmp_path, home)
    mirror.fetch()
    assert (tmp_path / "metrics.csv").read_text() == "1 and 2"
    mirror.send()
    assert contents(home) == {"metrics.csv": b"1 and 2", "new": b"new"}


def test_what_was_deleted_from_the_store_is_not_continued(tmp_path, home):
    (tmp_path / "metrics.csv").write_text("1")
    Mirror(tmp_path, home).send()
    (home / "metrics.csv").unlink()
    Mirror(tmp_path, home).fetch()
    assert not (tmp_path / "metrics.csv").exists()


def test_another_node_sends_only_what_is_written_from_now_on(tmp_path, home):
    (tmp_path / "metrics.csv").write_text("of a run that this node once began")
    mirror = Mirror(tmp_path, home, is_first=False)
    (tmp_path / "rank_1").write_text("1")
    mirror.send()
    assert contents(home) == {"rank_1": b"1"}


@pytest.mark.parametrize("fault", [Fault("status", 503), Fault("status", 429), Fault("reset"), Fault("lost")])
def test_a_request_that_fails_is_repeated(tmp_path, bucket, proxy, fault):
    (tmp_path / "a").write_text("1")
    proxy.fail(fault)
    Mirror(tmp_path, as_path(bucket) / "run").send()
    assert contents(as_path(bucket) / "run") == {"a": b"1"}


@pytest.mark.filterwarnings("always::UserWarning")
def test_files_stay_local_while_the_store_refuses_them_and_are_sent_when_it_does_not(tmp_path, bucket, proxy):
    home = as_path(bucket) / "run"
    rule = proxy.fail(Fault("status", 403), times=float("inf"), matches=lambda request: request.method == "PUT")
    (tmp_path / "a").write_text("1")
    mirror = Mirror(tmp_path, home, every=0.05)
    with pytest.warns(UserWarning, match="training continues") as caught:  # noqa: PT031 - a thread's warning
        mirror.start()
        wait_until(lambda: rule.seen > 2)
    assert len(caught) == 1
    with pytest.raises(StoreError, match="not permitted"):
        mirror.send()
    proxy.heal()
    wait_until(lambda: contents(home) == {"a": b"1"})
    mirror.close(lambda: 60)


def test_files_that_the_store_does_not_take_at_the_end_are_named(tmp_path, bucket, proxy):
    proxy.fail(Fault("status", 403), times=float("inf"), matches=lambda request: request.method == "PUT")
    (tmp_path / "a").write_text("1")
    mirror = Mirror(tmp_path, as_path(bucket) / "run")
    with pytest.warns(UserWarning, match=r"1 files of the run, such as 'a'.*copy them from there"):
        mirror.close(lambda: 60)
    shutil.rmtree(tmp_path)
