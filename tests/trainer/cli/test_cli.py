"""The ``echelon`` command, in separate processes: what it prints, what it runs, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import WatchedProgram, run_program
from test_config import CONFIG, PARTS

from echelon.trainer.cli.main import COMMANDS, main

_ECHELON = ["-W", "error", "-c", "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"]


def _echelon(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return run_program(*_ECHELON, *words, folder=folder, environ=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a config and, next to it, the module that it names."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config_parts.py").write_text(PARTS)
    (tmp_path / "configs" / "run.yaml").write_text(CONFIG)
    return tmp_path


def test_help_shows_the_commands_a_config_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("fit ", "validate ", "test ", "predict ", "ckpt ", "echelon fit config.yaml", "143 ended by SIGTERM"):
        assert words in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = COMMANDS[name].help
    assert sentence.endswith(".")
    for words in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        shown = capsys.readouterr().out
        assert caught.value.code == 0
        assert sentence in " ".join(shown.split())
        assert max(len(line) for line in shown.splitlines()) <= 120
    assert shown.startswith(f"usage: echelon {name} ")
    assert "exit codes:" in shown


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, *_ECHELON, "completion", "bash"]  # which does not import torch
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.stderr is not None
        errors = run.stderr.read()
    assert (run.returncode, errors) == (0, "")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.metadata

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"echelon {importlib.metadata.version('echelon')}"


def test_help_imports_no_config_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom echelon.trainer.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('omegaconf', 'yaml', 'tensorboard', 'torchvision') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_print_config_shows_overrides_and_resolved_values_and_runs_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(folder / "configs" / "run.yaml")
    assert main(["fit", config, "module.lr=5", "--print-config", "trainer.max_epochs=9"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 5\n" in shown
    assert "epochs: 9\n" in shown
    assert "precision: 32-true\n" in shown
    assert "\n  width: 2\n" in shown  # a default of the module's class
    assert sorted(path.name for path in folder.rglob("*.ckpt")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit"], "the following arguments are required: CONFIG"),
        (["fitt", "x.yaml"], "there is no command 'fitt'. Did you mean 'fit'?"),
        (["smaples", "run"], "there is no command 'smaples'. Did you mean 'samples'?"),
        (["samples", "run", "more"], "unknown argument 'more'; see `echelon samples --help`"),
        ([], "the following arguments are required: COMMAND"),
        (["fit", "x.yaml", "--max_epochs", "3"], "unknown option '--max_epochs'; see `echelon fit --help`"),
    ],
)
def test_a_wrong_command_line_exits_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_config_error_is_one_message_and_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(folder / "configs" / "run.yaml")
    assert main(["fit", config, "nonsense"]) == 2
    shown = capsys.readouterr()
    assert (
        shown.err == "echelon: error: 'nonsense' is not an override; write key=value, such as trainer.max_epochs=3.\n"
    )
    assert shown.out == ""
    assert main(["fit", config, "nonsense", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_fit_then_test_from_its_checkpoint_with_the_module_beside_the_config(folder: Path) -> None:
    done = _echelon(
        folder, "fit", "configs/run.yaml", "trainer.max_epochs=1", "trainer.logger=true", "trainer.log_every_n_steps=1"
    )
    assert done.returncode == 0, done.stderr
    run = folder / "echelon_logs" / "version_0"
    assert "max_epochs: 1" in (run / "config.yaml").read_text()
    (checkpoint,) = (run / "checkpoints").glob("epoch*.ckpt")
    tested = _echelon(folder, "test", "configs/run.yaml", f"ckpt_path={checkpoint}")
    assert tested.returncode == 0, tested.stderr
    assert "test_loss" in tested.stdout


def test_a_mistake_in_the_config_is_found_before_anything_runs(folder: Path) -> None:
    done = _echelon(folder, "fit", "configs/run.yaml", "trainer.max_epoch=1")
    assert done.returncode == 2
    assert (
        done.stderr == "echelon: error: trainer.max_epoch=1 is not a setting of Trainer. Did you mean 'max_epochs'?\n"
    )


def test_a_run_that_fails_exits_with_1_and_says_why(folder: Path) -> None:
    done = _echelon(folder, "fit", "configs/run.yaml", "ckpt_path=nowhere.ckpt")
    assert done.returncode == 1
    assert done.stderr.startswith("echelon: error: ")
    assert "nowhere.ckpt" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_the_users_own_keeps_its_traceback(folder: Path) -> None:
    path = folder / "configs" / "config_parts.py"
    path.write_text(PARTS.replace('self.log("loss", loss)', "raise ZeroDivisionError"))
    done = _echelon(folder, "fit", "configs/run.yaml")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "in training_step" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_the_code_that_schedulers_know_and_a_checkpoint(
    folder: Path, number: signal.Signals, code: int
) -> None:
    path = folder / "configs" / "config_parts.py"
    path.write_text(PARTS.replace('self.log("loss", loss)', 'print("step", self.global_step, flush=True)'))
    words = [*_ECHELON, "fit", "configs/run.yaml", "trainer.max_epochs=-1", "trainer.logger=true"]
    run = WatchedProgram(words, folder=folder)
    while run.readline() != "step 3\n":
        assert run.poll() is None
    run.send_signal(number)
    _, errors = run.communicate()
    assert run.returncode == code, errors
    assert "Traceback" not in errors
    [saved] = folder.glob("echelon_logs/version_0/checkpoints/*.ckpt")
    assert f"resume with fit(..., ckpt_path='{saved}')" in errors


def test_every_command_runs_and_checkpoints_have_one_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = "configs/run.yaml"
    assert main(["fit", config, "trainer.default_root_dir=out"]) == 0
    capsys.readouterr()
    assert main(["validate", config, "ckpt_path=last", "trainer.default_root_dir=out"]) == 0
    assert "val_loss" in capsys.readouterr().out
    assert main(["predict", config, "ckpt_path=last", "trainer.default_root_dir=out"]) == 0
    assert capsys.readouterr().out.count("predicting 2") == 2
    assert main(["ckpt", "ls", "out/checkpoints"]) == 0
    assert "epoch=1-step=4.ckpt" in capsys.readouterr().out
    sys.modules.pop("config_parts")


def test_a_run_that_resumes_for_longer_than_its_saved_schedule_is_refused_with_the_key_that_helps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    schedule = "\nlr_scheduler: {_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, interval: step}\n"
    one_cycle = folder / "configs" / "one_cycle.yaml"
    one_cycle.write_text(f"{CONFIG}{schedule}optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}\n")
    words = ["fit", str(one_cycle), "trainer.default_root_dir=out"]
    longer = [*words, "lr_scheduler.total_steps=8", "trainer.max_epochs=4", "ckpt_path=last"]
    assert main([*words, "lr_scheduler.total_steps=4", "trainer.max_epochs=2"]) == 0
    assert main(longer) == 1
    said = capsys.readouterr().err
    assert "total_steps=4, and would end before this run does" in said
    assert "optimizer_settings=configured" in said
    assert main([*longer, "optimizer_settings=newest"]) == 2
    assert "it must be 'saved' or 'configured'" in capsys.readouterr().err
    assert main([*longer, "optimizer_settings=configured"]) == 0
    assert main(["ckpt", "ls", "out/checkpoints"]) == 0
    assert "epoch=3-step=8.ckpt" in capsys.readouterr().out
    sys.modules.pop("config_parts")
