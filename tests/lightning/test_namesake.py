"""The folder `lightning` gets in nobody's way in the root of a checkout, where Python finds it by that name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program, **settings):
    """Run a program in the root of the checkout, without installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **settings,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_lightning_is_not_there_where_it_is_not_installed():
    program = """
import sys
for name in ("lightning", "lightning.pytorch", "lightning"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error.name, [name for name in sys.modules if name.startswith("lightning")])
"""
    assert run(program) == ["lightning", "[]"] * 3


def test_lightning_is_found_where_it_is_installed(tmp_path):
    package = tmp_path / "lightning" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("from .pytorch import Trainer\n__version__ = '2.6.6'\n")
    (package / "__init__.py").write_text("from lightning import pytorch\nclass Trainer: pass\n")
    program = """
import lightning.pytorch as pl, lightning, importlib, sys
assert lightning.Trainer is pl.Trainer and sys.modules["lightning"] is lightning
assert not hasattr(lightning, "stand_in") and "lightning.namesake" not in sys.modules
print(lightning.__version__, lightning.__file__)
"""
    assert run(program, env={"PYTHONPATH": str(tmp_path)}) == ["2.6.6", str(package.parent / "__init__.py")]
