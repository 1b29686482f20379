"""Errors of single file calls while a run resumes and saves: each call fails once, with each of 8 errors, on each rank.

``python tests/faults/file_errors.py`` takes every call and 8 errors in one process and in two; with ``--errors 1`` it
takes one for each call. A preloaded library (``file_errors.c``) makes the calls fail. A case is in order if `fit`
returns, or raises an error of Echelon, on all ranks, and if every checkpoint that was there loads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import faulthandler
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ERRORS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT, errno.EMFILE, errno.ESTALE]


def build(folder: Path) -> Path:
    """Compile the library."""
    library = folder / "file_errors.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "file_errors.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


def run(num_ranks: int, arguments: list[str]) -> int:
    """Run the cases in processes that have the library loaded; return the exit code."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk that syncs is ten times slower
    with tempfile.TemporaryDirectory(prefix="echelon-file-errors-", dir=memory) as folder:
        library = build(Path(folder))
        environment = {**os.environ, "LD_PRELOAD": str(library), "FILE_ERRORS": str(library), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__)), "--inside", folder, "--ranks", str(num_ranks), *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


class Cases:
    """The cases of one program; with two ranks both do all of them, and one of them suffers the error."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.library: Any = ctypes.CDLL(os.environ["FILE_ERRORS"])
        self.library.faults_name.restype = ctypes.c_char_p
        self.num_cases = self.num_ended = self.num_faults = 0
        self.alarm: threading.Timer | None = None
        self.ended = ""

    def fit(self, run: Path, max_epochs: int, armed: tuple[int, int] | None) -> str:
        """Continue a run; return how it ended."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from echelon import CSVLogger, EchelonError, ModelCheckpoint, Trainer, TrainModule

        class Small(TrainModule):
            def __init__(self) -> None:
                super().__init__()
                self.net: Any = torch.nn.Linear(2, 2)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.net(batch[0]).square().mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        saver = ModelCheckpoint(
            run / "ckpt", every_n_epochs=1, save_last=True, save_top_k=2, monitor="step", mode="max"
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=self.num_ranks,
            strategy="zero" if self.num_ranks == 2 else "auto",
            default_root_dir=run,
            logger=CSVLogger(run, "logs", version=0, flush_logs_every_n_steps=1),
            callbacks=[saver],
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=max_epochs,
            log_every_n_steps=1,
        )
        data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
        if armed is not None:
            self.library.faults_arm(str(run).encode(), *armed)
        try:
            trainer.fit(Small(), data, ckpt_path="last")
        except EchelonError as error:
            return f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001 - what must not come out
            return f"RAW {traceback.format_exc()}"
        finally:
            self.library.faults_disarm()
        return ""

    def case(self, culprit: int, nth: int, error: int) -> bool:
        """Let one call of one rank fail; return whether there was such a call, the same on all ranks."""
        from echelon import CheckpointError
        from echelon.trainer.checkpoint import list_checkpoints, newest_valid, verify

        run = self.folder / "run"
        if self.rank == 0:
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(self.folder / "seed", run, symlinks=True)
        self.meet("copied")
        self.watch(f"call {nth} of rank {culprit} with {errno.errorcode[error]}")
        before = {found.path: found.saved_at for found in list_checkpoints(run / "ckpt")}
        self.ended = "in fit"
        self.ended = ended = self.fit(run, 3, (nth, error) if self.rank == culprit else None)
        fired = bool(self.library.faults_fired()) if self.rank == culprit else False
        call = self.library.faults_name().decode()
        ends = self.meet("ended", {"ended": ended, "fired": fired, "call": call})
        fired, call = ends[culprit]["fired"], ends[culprit]["call"]
        where = f"call {nth} ({call}) of rank {culprit} with {errno.errorcode[error]}"
        if self.rank == 0 and fired:
            self.num_cases += 1
            self.num_ended += any(end["ended"] for end in ends)
            for rank, end in enumerate(ends):
                if end["ended"].startswith("RAW"):
                    self.report(f"{where}: rank {rank}: {end['ended']}")
            if len({bool(end["ended"]) for end in ends}) > 1:
                self.report(f"{where}: the ranks end in different ways: {[end['ended'][:200] for end in ends]}")
            try:
                for path in before:
                    if path.exists():
                        verify(path)
                if newest_valid(run / "ckpt") is None or not (run / "ckpt" / "last.ckpt").exists():
                    self.report(f"{where}: no checkpoint, or a link to nothing, is left")
            except CheckpointError as damaged:
                self.report(f"{where}: {damaged}")
        self.meet("checked")
        return fired

    def report(self, fault: str) -> None:
        """Print a fault, and count it."""
        print(fault, flush=True)
        self.num_faults += 1

    def watch(self, case: str) -> None:
        """Print what runs, and the stacks, and end if it has not ended in a minute."""
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = threading.Timer(60, self.give_up, [case])
        self.alarm.daemon = True
        self.alarm.start()

    def give_up(self, case: str) -> None:
        print(f"rank {self.rank}: {case} does not end ({self.ended or 'fit has returned'}):", flush=True)
        faulthandler.dump_traceback(sys.__stdout__, all_threads=True)
        os._exit(1)

    def meet(self, what: str, told: Any = None) -> list[Any]:
        """Wait for the other rank through files, and return what each has reported."""
        import time

        self.number = getattr(self, "number", 0) + 1
        folder = self.folder / "meetings"
        folder.mkdir(exist_ok=True)
        own = folder / f"{self.number}-{self.rank}"
        own.with_suffix(".new").write_text(json.dumps(told))
        own.with_suffix(".new").rename(own)
        texts = []
        for rank in range(self.num_ranks):
            path = folder / f"{self.number}-{rank}"
            began = time.monotonic()
            while not path.exists():
                if time.monotonic() - began > 120:
                    raise TimeoutError(f"rank {rank} did not come to {what}")
                time.sleep(0.001)
            texts.append(json.loads(path.read_text()))
        return texts

    def all(self, num_errors: int, stride: int) -> int:
        """Take every call in turn; return the exit code."""
        seed = self.folder / "seed"
        ended = self.fit(seed, 2, None)
        assert not ended, ended
        self.meet("begun")
        for culprit in range(self.num_ranks):
            nth, num_misses = 1, 0
            while num_misses < 2:  # how many calls there are depends on the time that a run takes
                errors = [ERRORS[(nth + number) % len(ERRORS)] for number in range(num_errors)]
                have_fired = [self.case(culprit, nth, error) for error in errors]
                num_misses = 0 if any(have_fired) else num_misses + 1
                nth += max(1, stride // 7) if culprit else stride  # other ranks make few
                if self.rank == 0 and self.num_cases % 100 < num_errors:
                    print(f"{self.num_cases} errors, up to call {nth - 1} of rank {culprit}", flush=True)
        if self.rank == 0:
            ends = f"{self.num_ended} ended in order, {self.num_faults} faults"
            print(f"{self.num_cases} errors in {self.num_ranks} processes, {ends}", flush=True)
        return 1 if self.num_faults else 0


def in_ranks(num_ranks: int, work: Callable[[int], int]) -> int:
    """Do some work in forks that are the ranks of a launch by hand; return the highest exit code."""
    import torch

    import echelon

    torch.set_num_threads(1)
    assert echelon.Trainer  # each fork would import it
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    pids = []
    for rank in range(num_ranks):
        if pid := os.fork():
            pids.append(pid)
            continue
        numbers = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        code = 1
        try:
            code = work(rank)
        finally:
            os._exit(code)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", type=int, default=len(ERRORS), help="errors for each call")
    parser.add_argument(
        "--stride", type=int, default=1, help="take each n-th call of rank 0 only, and of the other each n/7-th"
    )
    parser.add_argument("--ranks", type=int, choices=[1, 2])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = ["--errors", str(options.errors), "--stride", str(options.stride)]
    if options.inside is None:
        return max(run(ranks, arguments) for ranks in ([options.ranks] if options.ranks else [1, 2]))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):

        def take(rank: int) -> int:
            return Cases(options.inside, rank, options.ranks).all(options.errors, options.stride)

        return in_ranks(2, take) if options.ranks == 2 else take(0)


if __name__ == "__main__":
    sys.exit(main())
