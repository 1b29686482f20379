"""Names of packages come when they are asked for: those that type checkers see, each from where it is defined."""

import ast
import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from echelon.common.lazy_names import lazy_names
from echelon.lightning.demos.boring import BoringModel

ROOT = Path(echelon.__file__).parent
PACKAGES = ["echelon", "echelon.callbacks", "echelon.strategies", "echelon.trainer.checkpoint"]
WITHOUT_TORCH = """
import sys
from echelon.trainer.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
assert not code, code
assert "torch" not in sys.modules, "torch was imported"
"""


def python(program, *words, folder=None):
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_for_checkers(package):
    """Return the names that are imported where only a type checker looks, with the modules that define them."""
    file = ROOT.joinpath(*package.split(".")[1:], "__init__.py")
    (block,) = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If))
    return {
        alias.asname: f"{package}.{node.module}" if node.module else package
        for node in block.body
        for alias in node.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_found_is_what_type_checkers_see(package):
    module, seen = importlib.import_module(package), names_for_checkers(package)
    assert sorted({*seen, *(["__version__"] if package == "echelon" else [])}) == module.__all__
    for name, where in seen.items():
        assert getattr(module, name) is getattr(importlib.import_module(where), name), name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_that_of_a_module_which_its_import_would_put_in_its_place(package):
    names = names_for_checkers(package)
    folder = ROOT.joinpath(*package.split(".")[1:])
    assert [name for name, where in names.items() if where != package and (folder / f"{name}.py").exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_and_a_star_import_have_every_name(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    names = {}
    exec(f"from {package} import *", names)  # noqa: S102 - no function may hold it
    assert set(module.__all__) <= set(names)


def test_importing_echelon_imports_nothing_else_and_threads_that_ask_for_a_name_at_once_get_the_same():
    python("""
import sys, threading
import echelon
assert "torch" not in sys.modules
echelon.__version__; dir(echelon)
assert "torch" not in sys.modules
echelon.ConfigError
assert "torch" not in sys.modules
found, start = [], threading.Barrier(8)
def ask():
    start.wait()
    found.append((echelon.Trainer, echelon.strategies.DDPStrategy, echelon.callbacks))
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and len(set(found)) == 1
assert "torch" in sys.modules
echelon.trainer.checkpoint.load; echelon.common.errors
""")


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["completion", "bash"], ["ckpt", "--help"]])
def test_a_command_that_computes_nothing_does_not_import_torch(words, tmp_path):
    assert python(WITHOUT_TORCH, *words, folder=tmp_path)


def test_listing_checkpoints_does_not_import_torch(tmp_path):
    module = BoringModel()
    saves = echelon.ModelCheckpoint(tmp_path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    echelon.Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0, callbacks=saves, **quiet).fit(module)
    assert "step 2" in python(WITHOUT_TORCH, "ckpt", "ls", tmp_path)


def test_a_missing_name_is_an_attribute_error_that_names_the_package():
    with pytest.raises(AttributeError, match="module 'echelon' has no attribute 'Trianer'"):
        echelon.Trianer  # noqa: B018 - it is the test
    with pytest.raises(ImportError, match="cannot import name 'Trianer' from 'echelon'"):
        from echelon import Trianer  # noqa: F401 - it is the test
    assert not hasattr(echelon, "__path_to_nowhere__")
    assert not hasattr(echelon, "examples"), "a folder of the checkout is no module"


def test_classes_are_pickled_and_copied_as_ever():
    for name in ("Trainer", "TrainModule", "FSDPStrategy", "ConfigError"):
        thing = getattr(echelon, name)
        assert pickle.loads(pickle.dumps(thing)) is thing is copy.deepcopy(thing)


def test_a_name_that_a_program_has_replaced_stays_replaced(monkeypatch):
    monkeypatch.setattr(echelon, "Trainer", None)
    assert echelon.Trainer is None
    assert echelon.TrainModule is not None
    monkeypatch.undo()
    assert echelon.Trainer is importlib.import_module("echelon.trainer.trainer").Trainer


def test_a_package_of_its_own_asks_each_module_when_its_name_is_used(tmp_path, monkeypatch):
    package = tmp_path / "plain"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from echelon.common.lazy_names import lazy_names\n"
        "__getattr__, __dir__, __all__ = lazy_names(__name__, {'one': ['first'], '': ['two']}, here=['own'])\n"
        "own = 3\n"
    )
    (package / "one.py").write_text("first = 1\n")
    (package / "two.py").write_text("second = 2\n")
    (package / "broken.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    plain = importlib.import_module("plain")
    assert plain.__all__ == ["first", "own", "two"]
    assert "plain.one" not in sys.modules and plain.first == 1 and "plain.one" in sys.modules
    assert plain.two.second == 2
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        plain.broken  # noqa: B018 - it is the test
    with pytest.raises(AttributeError, match="'inner'"):
        plain.inner  # noqa: B018 - it is the test
    with pytest.raises(KeyError):
        lazy_names("not.imported", {})
