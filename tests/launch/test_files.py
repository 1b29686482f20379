"""The list of files in docs/security.md matches the disk, with modes, for each kind of run."""

import fnmatch
import os
import re
import stat
import sys
import tempfile
from multiprocessing import util
from pathlib import Path

import pytest
import torch
from small import Regression, loader, quiet

from echelon import Callback, CSVLogger, GoodputMonitor, ModelCheckpoint, SampleLedger, TensorBoardLogger
from echelon.strategies.launch.fork_server import preload_modules

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
OF_OTHERS = ("pymp-*", "torchinductor_*")
AT_TIMES = {"config.yaml", ".*.new/", ".*.old/", ".*.gone/"}
MASK = 0o027


def listed():
    """Return the mode of each name pattern, by its place; "" is the folder of the run."""
    table = PAGE.read_text().partition("## Files")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    places = {}
    for names, mode, *_ in rows:
        patterns, _, place = names.partition(" in ")
        found = re.findall("`([^`]+)`", patterns)
        if "<" in patterns:  # a folder until it gets its name, and after
            found = [f".*{Path(name).suffix}/" for name in (found[0], *(f"x{end}" for end in found[1:]))]
        places.setdefault(place.strip("`"), {}).update(dict.fromkeys(found, mode))
    return places


class Named(Regression):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.save_hyperparameters()


class Looks(Callback):
    """Records, in the third step, what is in the folders."""

    def __init__(self, folders, caller, file):
        self.folders, self.caller, self.file = folders, caller, file

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.strategy.barrier()
        if batch_idx == 2 and trainer.strategy.rank == 0:
            memory = Path("/dev/shm").glob(f"echelon-node-{self.caller}-*")
            torch.save({"/dev/shm": seen(memory)} | {p: seen(f.rglob("*")) for p, f in self.folders.items()}, self.file)
        trainer.strategy.barrier()


def seen(paths):
    return {str(path): path.lstat().st_mode for path in paths}


def names_in(pattern, names):
    """Return the names that a pattern matches; with a trailing slash, what is in such a folder."""
    end = f"{pattern}*" if pattern.endswith("/") else pattern
    return {name for name in names if fnmatch.fnmatch(name, f"*/{end}")}


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Return what is in each place during and after a fit with a strategy."""
    folders = {"": tmp_path / "run", "the temporary directory": tmp_path / "temporary"}
    preload_modules(())
    util.get_temp_dir()  # multiprocessing has one for all of this process
    monkeypatch.setattr(tempfile, "tempdir", str(folders["the temporary directory"]))
    monkeypatch.setenv("TMPDIR", str(folders["the temporary directory"]))
    before = os.umask(MASK)

    def run(strategy):
        for folder in folders.values():
            folder.mkdir()
        looks = Looks(folders, os.getpid(), tmp_path / "seen")
        writers = [ModelCheckpoint(save_last=True, every_n_train_steps=2), SampleLedger(), GoodputMonitor()]
        trainer = quiet(
            folders[""],
            strategy=strategy,
            devices=1 if strategy == "single" else 2,
            max_epochs=1,
            logger=[TensorBoardLogger(folders[""]), CSVLogger(folders[""])],
            callbacks=[looks, *writers],
            enable_checkpointing=True,
        )
        trainer.fit(Named(), loader(16, 2))
        during = torch.load(tmp_path / "seen")
        return {
            place: seen(folders[place].rglob("*")) | found if place in folders else found
            for place, found in during.items()
        }

    yield run
    os.umask(before)


@pytest.mark.parametrize("strategy", ["single", "ddp", "ps", "elastic"])
def test_what_stands_on_the_disk_is_listed_with_its_mode(strategy, fit):
    places, found = listed(), fit(strategy)
    files = {path: mode for path, mode in found[""].items() if not stat.S_ISDIR(mode)}
    folders = {stat.S_IMODE(mode) for mode in found[""].values() if stat.S_ISDIR(mode)}
    assert folders == {0o777 & ~MASK}
    for pattern, listed_mode in places[""].items():
        names = names_in(pattern, files)
        assert names or pattern in AT_TIMES, f"no file is {pattern}"
        modes = {"link" if stat.S_ISLNK(mode) else stat.S_IMODE(mode) for mode in map(files.pop, names)}
        assert modes <= {"link" if listed_mode == "link" else 0o666 & ~MASK}, (pattern, modes)
    assert not files, "not in the list of docs/security.md"
    for place in places.keys() - {""}:
        tops = {path: mode for path, mode in found[place].items() if Path(path).parent.name in ("temporary", "shm")}
        for path, mode in tops.items():
            if not any(fnmatch.fnmatch(Path(path).name, pattern) for pattern in OF_OTHERS):
                [listed_mode] = [m for p, m in places[place].items() if fnmatch.fnmatch(Path(path).name, p)]
                assert stat.S_IMODE(mode) == int(listed_mode, 8), path
        assert tops or strategy != "elastic", place
