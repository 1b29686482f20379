"""An error in any single file call while a run resumes and saves ends it cleanly on all ranks, or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from as_rank import double_trainer
from small import Regression, loader
from sweep import only_in_sweep

from echelon import ConfigError, CSVLogger
from echelon.testing import run_ranks


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
# `make fuzz` takes each call, with each error
@pytest.mark.parametrize(("ranks", "stride"), [(1, 13), *only_in_sweep((2, 189))])
def test_a_call_may_fail_wherever_it_stands(ranks: int, stride: int) -> None:
    script = Path(__file__).with_name("file_errors.py")
    process = subprocess.Popen(
        [sys.executable, str(script), "--ranks", str(ranks), "--errors", "1", "--stride", str(stride)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=960)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]
    assert f"in {ranks} processes" in output
    assert " 0 faults" in output


def error_of_fit(**settings: Any) -> str:
    trainer = double_trainer(max_epochs=1, **settings)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Regression(), loader(8, 2), ckpt_path="last")
    return str(caught.value)


def fit_where_rank_1_cannot_write(folder: Path) -> str:
    root = folder / ("file" if os.environ["RANK"] == "1" else "folder")
    return error_of_fit(default_root_dir=root, enable_checkpointing=True)


def test_a_folder_that_one_rank_cannot_write_to_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = run_ranks(fit_where_rank_1_cannot_write, 2, tmp_path, timeout=120)
    assert all(re.match(r"default_root_dir='.*file' cannot be written to \(", error) for error in errors)
    assert [error.endswith("This happened on rank 1 of 2; look at its node.") for error in errors] == [True, False]


class OnFullDisk(CSVLogger):
    """A logger that finds the disk full when it resumes."""

    def resume_at(self, step: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def fit_on_full_disk(folder: Path) -> str:
    return error_of_fit(default_root_dir=folder, logger=OnFullDisk(folder, "logs"))


def test_a_logger_that_cannot_go_on_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    errors = run_ranks(fit_on_full_disk, 2, tmp_path, timeout=120)
    assert errors[0] == errors[1]
    assert errors[0].startswith("OnFullDisk cannot start ([Errno 28] No space left on device)")
