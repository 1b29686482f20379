"""The node folder is private, is removed with its owner, and is never another user's."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.common.errors import ProcessError
from echelon.strategies.launch.node_folder import NodeFolder, allocate_file, check_owner, free_bytes

HOLD = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"


def names(parent):
    return sorted(path.name for path in parent.iterdir())


def test_it_is_private_in_memory_and_gone_at_the_end():
    with NodeFolder.create() as folder:
        check_owner(folder.path)
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert str(os.getpid()) in folder.path.name
        if Path("/dev/shm").is_mount() and os.access("/dev/shm", os.W_OK):
            assert folder.path.parent == Path("/dev/shm")
        (folder.path / "deep").mkdir()
        (folder.path / "deep" / "file").write_text("x")
    assert not folder.path.exists()
    folder.remove()


def test_a_folder_is_removed_once_its_owner_is_dead_and_not_before(tmp_path):
    with NodeFolder.create(tmp_path) as mine:
        theirs = tmp_path / "echelon-node-1-theirs"
        theirs.mkdir(mode=0o700)
        (theirs / "file").write_text("x")
        with subprocess.Popen(
            [sys.executable, "-S", "-c", HOLD, str(theirs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as owner:
            owner.stdout.readline()
            with NodeFolder.create(tmp_path) as other:
                assert names(tmp_path) == sorted([mine.path.name, theirs.name, other.path.name])
            owner.kill()
        with NodeFolder.create(tmp_path) as other:
            assert names(tmp_path) == sorted([mine.path.name, other.path.name])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_fork_server_of_another_program_is_asked_nothing(tmp_path):
    folder = tmp_path / "pymp-0"
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listener:  # as multiprocessing's; a connection without a request ends that
        listener.bind(str(folder / "listener-0"))
        listener.listen()
        listener.settimeout(0.1)
        os.utime(folder, (0, 0))
        with NodeFolder.create(tmp_path):
            assert folder.exists()
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_folder_of_another_user_is_neither_removed_nor_trusted(tmp_path):
    theirs = tmp_path / "echelon-node-1-theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with NodeFolder.create(tmp_path):
        assert theirs.exists()
    with pytest.raises(ProcessError, match=r"belongs to user 12345 with mode drwx------, .* to be trusted"):
        check_owner(theirs)


def test_what_others_may_open_or_only_has_the_name_is_neither_removed_nor_trusted(tmp_path):
    target, link = tmp_path / "target", tmp_path / "echelon-node-1-link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    opened = tmp_path / "echelon-node-1-open"
    opened.mkdir()
    opened.chmod(0o755)
    with NodeFolder.create(tmp_path):
        assert link.is_symlink() and target.exists() and opened.exists()
    for folder in (link, opened):
        with pytest.raises(ProcessError, match="to be trusted"):
            check_owner(folder)
    with pytest.raises(ProcessError, match="No such file"):
        check_owner(tmp_path / "absent")


def test_the_owner_holds_it_and_no_longer_after_the_end(tmp_path):
    folder = NodeFolder.create(tmp_path)
    lock = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.remove()
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def test_a_place_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(ProcessError, match=r"absent cannot be used .* No such file .* TMPDIR"):
        NodeFolder.create(tmp_path / "absent")


def test_memory_is_there_before_it_is_mapped_or_its_lack_is_told(memory_path):
    file = memory_path / "file"
    file.write_text("old")
    allocate_file(file, 100_000)
    assert file.read_bytes() == bytes(100_000)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    size = free_bytes(memory_path) + (1 << 40)
    with pytest.raises(ProcessError, match=rf"no room .* of {size} bytes, where \d+ bytes are free: .*--shm-size"):
        allocate_file(file, size)
    assert not file.exists()
