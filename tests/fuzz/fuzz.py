"""A fuzzer of checkpoints, configs and run folders: ``python tests/fuzz/fuzz.py 20000``.

Each case is a function of its seed: a sound file is mutated and read by everything that reads such files. A case fails
if anything but an error of Echelon comes out, if it takes more than a second of the processor or more memory than twice
what lies on the disk (and what any reader takes), if anything outside of its folder is written, deleted or started, or
if a control character is printed. ``--seed N`` repeats one case, ``--from N`` goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from mutations import mutate_bytes, mutate_checkpoint, mutate_yaml, replace_entry
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import (
    CSVLogger,
    EarlyStopping,
    EchelonError,
    GoodputMonitor,
    ModelCheckpoint,
    SampleLedger,
    Trainer,
    TrainModule,
)
from echelon.trainer.cli import main as command
from echelon.trainer.cli.config import check_config
from echelon.trainer.cli.config_file import load_config, with_all_defaults

SECONDS = 1.0
READER = 48 << 20
"""Bytes that any reader needs, whatever it reads: imports, threads, malloc's arenas."""
STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")

CONFIG = """\
seed: 7
trainer:
  max_epochs: 3
  accelerator: cpu
  gradient_clip_val: 0.5
  default_root_dir: FOLDER
  logger:
    _target_: echelon.CSVLogger
    save_dir: FOLDER
  callbacks:
    - _target_: echelon.callbacks.EarlyStopping
      monitor: loss
      patience: 3
module:
  _target_: echelon.TrainModule
data:
  _target_: echelon.DataModule
ckpt_path: null
deploy:
  nodes: 2
  memory: 4Gi
"""


class Small(TrainModule):
    """A module with two optimizers' worth of state, a schedule, and metrics of its epochs."""

    def __init__(self, width: int = 2, lr: float = 0.1, names: Any = ("a", "b")) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.norm(self.net(batch[0])).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), 2, shuffle=True)


def trainer_in(folder: Path, **settings: Any) -> Trainer:
    callbacks = [EarlyStopping("loss_epoch", patience=5), SampleLedger(), GoodputMonitor()]
    saver = ModelCheckpoint(
        folder / "checkpoints", monitor="loss_epoch", save_top_k=2, every_n_train_steps=3, save_last=True
    )
    return Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder.parent, folder.name, version=0),
        default_root_dir=folder,
        callbacks=[*callbacks, saver],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        **settings,
    )


def make_seed(folder: Path) -> Path:
    """Train, and return the folder of the run."""
    run = folder / "run"
    trainer_in(run).fit(Small(), data(), data())
    return run


@dataclass
class Watch:
    """What happens in this process while a case runs, as Python's audit events show."""

    inside: str = ""
    is_on: bool = False
    seen: list[str] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or self.seen is None:
            return
        if event in STARTS:
            self.seen.append(f"{event}{arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            writes = isinstance(arguments[2], int) and arguments[2] & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            )
            if writes and self._is_outside(arguments[0]):
                self.seen.append(f"writes {arguments[0]!r:.200}")
        elif event in WRITES and type(arguments[-1]) is int and arguments[-1] != -1:
            return  # a name in an open folder, whose tree is deleted
        elif event in WRITES and self._is_outside(
            arguments[0] if event not in ("os.symlink", "os.link") else arguments[1]
        ):
            self.seen.append(f"{event}{arguments!r:.200}")

    def _is_outside(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        path = os.path.abspath(os.fsdecode(path))
        folder = os.path.realpath(os.path.dirname(path)) + "/"
        if not os.path.lexists(path):  # behind a link to nothing
            return False
        return path not in ("/dev/null", self.inside) and not folder.startswith((self.inside + "/", "/proc/"))


def cases_of_checkpoints(run: Path, rng: random.Random) -> Callable[[], object]:
    """Mutate a checkpoint of a run, and return one of the calls that read it."""
    folders = sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink())
    path = rng.choice(folders)
    for _ in range(rng.choice([1, 1, 1, 2])):
        with contextlib.suppress(
            FileNotFoundError,
            ValueError,
            KeyError,
            IsADirectoryError,
            UnicodeError,
            RecursionError,
            AttributeError,
            TypeError,
            NotADirectoryError,
        ):
            mutate_checkpoint(path, rng)
    fit = lambda ckpt: trainer_in(run).fit(Small(), data(), data(), ckpt_path=ckpt)  # noqa: E731
    return rng.choice(
        [
            lambda: command.main(["ckpt", "ls", str(run / "checkpoints")]),
            lambda: command.main(["ckpt", "show", str(path)]),
            lambda: command.main(["ckpt", "verify", str(run / "checkpoints")]),
            lambda: command.main(["ckpt", "diff", str(folders[0]), str(folders[-1])]),
            lambda: command.main(["ckpt", "export", str(path), str(run / "exported")]),
            lambda: echelon.load_weights(path),
            lambda: echelon.load_weights(path / "model.safetensors"),
            lambda: Small.load_from_checkpoint(path),
            lambda: fit(path),
            lambda: fit(path),
            lambda: fit(path),
            lambda: fit("last"),
            lambda: trainer_in(run).validate(Small(), data(), ckpt_path=path),
        ]
    )


def cases_of_configs(run: Path, rng: random.Random) -> Callable[[], object]:
    """Mutate a config, and return one of the calls that read it."""
    path = run.parent / "config.yaml"
    path.write_bytes(mutate_yaml(CONFIG.replace("FOLDER", str(run.parent)), rng))
    override = rng.choice(
        ["seed=5", "trainer.max_epochs=[[[", "trainer.callbacks.0.patience=1e400", "module=${trainer}"]
    )

    def check() -> None:
        config = load_config(path, rng.choice([[], [override]]))
        with_all_defaults(config)
        check_config(config)

    return rng.choice(
        [
            check,
            lambda: command.main(["fit", str(path), "--print-config"]),
            lambda: command.main(["render", "--target", rng.choice(["slurm", "kubernetes"]), str(path)]),
        ]
    )


def cases_of_run_folders(run: Path, rng: random.Random) -> Callable[[], object]:
    """Mutate another file of a run, and return one of the calls that read it."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    path = rng.choice([*files, *(entry for entry in run.rglob("*") if "checkpoints" in entry.parts)])
    if path.is_file() and path in files and rng.random() < 0.85:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
    else:
        replace_entry(path, rng)
    hparams = next(iter(run.rglob("hparams.yaml")), run / "hparams.yaml")
    checkpoint = next(iter((run / "checkpoints").glob("epoch*")), run)
    return rng.choice(
        [
            lambda: command.main(["samples", str(run / "version_0")]),
            lambda: command.main(["goodput", str(run / "version_0"), "--json"]),
            lambda: command.main(["ckpt", "ls", str(run / "checkpoints")]),
            lambda: trainer_in(run).fit(Small(), data(), data(), ckpt_path="last"),
            lambda: Small.load_from_checkpoint(checkpoint, hparams_file=hparams),
        ]
    )


KINDS = {"checkpoint": cases_of_checkpoints, "config": cases_of_configs, "run folder": cases_of_run_folders}


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Collect what is printed."""
    out, err, texts = io.StringIO(), io.StringIO(), []  # type: ignore[var-annotated]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield texts
    texts += [out.getvalue(), err.getvalue()]


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def fault_of(seed: int, source: Path, work: Path, watch: Watch) -> str:
    """Run one case and return what is wrong; empty if nothing is."""
    rng = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work / "run", symlinks=True)
    kind = rng.choices(list(KINDS), [6, 2, 2])[0]
    size = sum(path.stat().st_size for path in (work / "run").rglob("*") if path.is_file())
    call = KINDS[kind](work / "run", rng)
    watch.inside, watch.seen = os.path.realpath(work), []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = peak_memory(), time.process_time()
    fault, error = "", ""
    with printed() as texts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch.is_on = True
        signal.alarm(10)
        try:
            call()
        except EchelonError as refused:
            error = str(refused)
        except SystemExit:
            pass
        except BaseException:  # noqa: BLE001 - what must not come out
            fault = traceback.format_exc()
        finally:
            signal.alarm(0)
            watch.is_on = False
    seconds, grown = time.process_time() - began, peak_memory() - before
    if not fault and watch.seen:
        fault = f"outside of its folder: {watch.seen}"
    if not fault and grown > 2 * size + READER:
        fault = f"{grown >> 20} MiB for {size} bytes"
    if not fault and seconds > SECONDS:
        fault = f"{seconds:.2f} s"
    odd = [letter for text in texts for letter in text if not letter.isprintable() and letter not in "\n\t"]
    if not fault and odd:
        fault = f"printed {odd[0]!r}"
    if not fault and len(error) > 20_000:
        fault = f"an error of {len(error)} letters"
    return f"seed {seed}, {kind}: {fault}" if fault else ""


def _too_slow(number: int, frame: Any) -> None:
    raise TimeoutError("10 s have passed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=1000)
    parser.add_argument("--from", type=int, dest="first", default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--keep", type=int, default=20, help="end after this many faults")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_slow)
    sys.dont_write_bytecode = True  # the watch would take Python's own files for ours
    watch = Watch()
    sys.addaudithook(watch)
    seeds = range(options.first, options.first + options.number) if options.seed is None else [options.seed]
    faults: list[str] = []
    with tempfile.TemporaryDirectory(
        prefix="echelon-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        with printed():
            source = make_seed(Path(folder) / "seed")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
        began = time.monotonic()
        for seed in seeds:
            fault = fault_of(seed, source, Path(folder) / "work", watch)
            if fault:
                faults.append(fault)
                print(fault, flush=True)
            if len(faults) >= options.keep:
                break
        print(f"{len(seeds)} cases, {len(faults)} faults, {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
