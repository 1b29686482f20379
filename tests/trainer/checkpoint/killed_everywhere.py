"""A program that forks a writer for each system call of a save, kills it there, and checks what is left.

Run by test_atomic_folder.py in a process of its own: forking wants a process without threads.
Usage: killed_everywhere.py FOLDER fresh|replace|remove|replace-without-exchange|random|rank-0|rank-1 [EVERY], or one of
the first four with -file, or rank-0-file: for checkpoints in one file; or node-0|node-1|replace-node-0|replace-node-1:
for nodes with folders of their own. EVERY is how many system calls lie between one kill and the next, by default 1.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from echelon.strategies.state.optimizer_state import Sharded
from echelon.trainer.checkpoint import (
    SavingGroup,
    Writer,
    list_checkpoints,
    load,
    newest_valid,
    point_link,
    remove_checkpoint,
    save,
)
from echelon.trainer.checkpoint.atomic_folder import delete_abandoned, find_part, is_stranded, list_unfinished
from echelon.trainer.checkpoint.manifest import Origin
from echelon.trainer.checkpoint.on_nodes.on_disk import manifest_digest
from echelon.trainer.checkpoint.single_file import SingleFile

TOUCHING_THE_DISK = {
    "open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir", "symlink", "scandir",
}  # fmt: skip


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((300, 100), float(step))},
        "optimizers": {"m": torch.full((10,), float(step))},
        "trainer": {"step": step},
    }


IS_FILE = sys.argv[2].endswith("-file")
EVERY = int(sys.argv[3]) if sys.argv[3:] else 1
save = functools.partial(save, single_file=SingleFile() if IS_FILE else None)


def in_child(work: Callable[[], None], kill_at: int) -> bool:
    """Run `work` in a fork that kills itself before its system call number `kill_at`; return whether it was killed."""
    _, status = os.waitpid(fork(work, kill_at), 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


def fork(work: Callable[[], None], kill_at: int = 0) -> int:
    """Start `work` in a fork, in the same way; 0 means that it is never killed. Return its process id."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def profile(frame: object, event: str, function: Any) -> None:
            nonlocal count
            if event == "c_call" and getattr(function, "__name__", "") in TOUCHING_THE_DISK:
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        if kill_at:
            sys.setprofile(profile)
        work()
        os._exit(0)
    return pid


def check(folder: Path, allowed: set[int]) -> None:
    """Every checkpoint under its name is whole and consistent, and the newest is one of `allowed` steps."""
    found = list_checkpoints(folder)
    assert found
    for checkpoint in found:
        loaded = load(checkpoint.path)
        assert (loaded["model"]["w"] == loaded["trainer"]["step"]).all()
        assert (loaded["optimizers"]["m"] == loaded["trainer"]["step"]).all()
    newest = newest_valid(folder)
    assert newest is not None
    assert load(newest)["trainer"]["step"] in allowed
    link = folder / "last.ckpt"
    if link.is_symlink() and not any(is_stranded(checkpoint.path) for checkpoint in found):
        assert load(link)["trainer"]["step"] in allowed | {1, 2}


def at_every_call(folder: Path, work: Callable[[], None], allowed: set[int]) -> int:
    kill_at, was_killed = 1 - EVERY, True
    while was_killed:
        kill_at += EVERY
        shutil.rmtree(folder, ignore_errors=True)
        save(folder / "a.ckpt", state(1))
        point_link(folder / "last.ckpt", folder / "a.ckpt")
        was_killed = in_child(work, kill_at)
        check(folder, allowed)
        delete_abandoned(folder)
        assert list_unfinished(folder) == []
        check(folder, allowed)
    return kill_at // EVERY


def fresh(folder: Path) -> int:
    def work() -> None:
        save(folder / "b.ckpt", state(2))
        point_link(folder / "last.ckpt", folder / "b.ckpt")

    return at_every_call(folder, work, {1, 2})


def replace(folder: Path) -> int:
    return at_every_call(folder, lambda: save(folder / "a.ckpt", state(2)), {1, 2})


def replace_without_exchange(folder: Path) -> int:
    def work() -> None:
        forbid_exchange()
        save(folder / "a.ckpt", state(2))

    return at_every_call(folder, work, {1, 2})


def forbid_exchange() -> None:
    """Let the kernel refuse renameat2 to this process, as a file system without it does."""
    number = {"x86_64": 316, "aarch64": 276}[platform.machine()]
    refuse = 0x00050000 | errno.ENOSYS
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter_, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def removing(folder: Path) -> int:
    def work() -> None:
        save(folder / "b.ckpt", state(2))
        point_link(folder / "last.ckpt", folder / "b.ckpt")
        remove_checkpoint(folder / "a.ckpt")

    return at_every_call(folder, work, {1, 2})


def one_of_two_ranks(folder: Path, victim: int) -> int:
    """Kill one of two ranks that write together, at each of its calls, and then the other, as a launcher does."""
    store = folder.with_name(f"store-{victim}")

    def work(rank: int) -> None:
        group = SavingGroup(FileStore(str(store), 2), rank, 2)
        whole = state(2)
        whole["optimizers"] = Sharded(m=whole["optimizers"]["m"]) if rank else Sharded()
        Writer(group).save(folder / "b.ckpt", whole, single_file=SingleFile() if IS_FILE else None)

    kill_at, was_killed = 1 - EVERY, True
    while was_killed:
        kill_at += EVERY
        shutil.rmtree(folder, ignore_errors=True)
        store.unlink(missing_ok=True)
        save(folder / "a.ckpt", state(1))
        other = fork(functools.partial(work, 1 - victim))
        was_killed = in_child(functools.partial(work, victim), kill_at)
        if was_killed:
            os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        check(folder, {1, 2} if was_killed else {2})
        delete_abandoned(folder)
        assert list_unfinished(folder) == []
        check(folder, {1, 2} if was_killed else {2})
    return kill_at // EVERY


def one_of_two_nodes(folder: Path, victim: int, name: str) -> int:
    """Kill one of two ranks, each with a folder of its own, at each of its calls, and then the other."""
    folders = [folder / "node0", folder / "node1"]

    def write(rank: int, step: int, name: str) -> None:
        group = SavingGroup(FileStore(str(folder / f"store-{step}"), 2), rank, 2, nodes=[0, 1])
        whole = state(step)
        whole["optimizers"] = Sharded(m=whole["optimizers"]["m"]) if rank else Sharded()
        Writer(group).save(folders[rank] / name, whole, origin=Origin("ab", f"2026-01-0{step}T00:00:00.000000+00:00"))

    def together(step: int, name: str, kill_at: int = 0) -> bool:
        other = fork(functools.partial(write, 1 - victim, step, name))
        was_killed = in_child(functools.partial(write, victim, step, name), kill_at)
        if was_killed:
            os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        return was_killed

    def steps() -> list[int]:
        """Return the steps of which both nodes have a part, and check what these parts are together."""
        found = []
        for one in list_checkpoints(folders[0]):
            part = find_part(folders[1] / one.path.name, manifest_digest(one.path))
            if part is not None:
                whole = folder / "whole.ckpt"
                for half in (one.path, part):
                    shutil.copytree(half, whole, dirs_exist_ok=True)
                loaded = load(whole)
                shutil.rmtree(whole)
                found.append(loaded["trainer"]["step"])
                assert (loaded["model"]["w"] == found[-1]).all()
                assert (loaded["optimizers"]["m"] == found[-1]).all()
        return found

    kill_at, was_killed = 1 - EVERY, True
    while was_killed:
        kill_at += EVERY
        shutil.rmtree(folder, ignore_errors=True)
        for place in folders:
            place.mkdir(parents=True)
        together(1, "a.ckpt")
        assert steps() == [1]
        was_killed = together(2, name, kill_at)
        assert set(steps()) <= {1, 2}
        assert max(steps()) >= 1 + (not was_killed)
        together(3, "c.ckpt")  # tidies up what the killed ones have left
        assert steps()[-1] == 3
        assert list_unfinished(folders[0]) == list_unfinished(folders[1]) == []
        assert [one.path.name for one in list_checkpoints(folders[0])] == [
            one.path.name for one in list_checkpoints(folders[1])
        ]
    return kill_at // EVERY


def at_random(folder: Path) -> int:
    """Kill a writer of one checkpoint after another from outside, wherever it is."""
    chance = random.Random(0)
    save(folder / "0.ckpt", state(0))
    step = 0
    for _ in range(40 // EVERY):
        pid = os.fork()
        if pid == 0:
            while True:
                step += 1
                save(folder / f"{step}.ckpt", state(step))
                point_link(folder / "last.ckpt", folder / f"{step}.ckpt")
                remove_checkpoint(folder / f"{step - 1}.ckpt")
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check(folder, set(range(10_000)))
        newest = newest_valid(folder)
        assert newest is not None
        reached = load(newest)["trainer"]["step"]
        assert reached >= step
        step = reached
    return 40 // EVERY


if __name__ == "__main__":
    modes = {
        "fresh": fresh,
        "replace": replace,
        "remove": removing,
        "replace-without-exchange": replace_without_exchange,
        "random": at_random,
        "rank-0": functools.partial(one_of_two_ranks, victim=0),
        "rank-1": functools.partial(one_of_two_ranks, victim=1),
        "node-0": functools.partial(one_of_two_nodes, victim=0, name="b.ckpt"),
        "node-1": functools.partial(one_of_two_nodes, victim=1, name="b.ckpt"),
        "replace-node-0": functools.partial(one_of_two_nodes, victim=0, name="a.ckpt"),
        "replace-node-1": functools.partial(one_of_two_nodes, victim=1, name="a.ckpt"),
    }
    print(modes[sys.argv[2].removesuffix("-file")](Path(sys.argv[1])))
