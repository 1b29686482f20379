"""The package is really built, installed and imported, from a copy of the tree."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import echelon

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]
REQUIREMENTS = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
]
OF_NO_TREE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "echelon_logs", "lightning_logs"
)


def run(*command, folder):
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments, folder):
    return run(sys.executable, "-m", "pip", "--no-input", *arguments, folder=folder)


def build(kind, tree, out):
    """Build a ``wheel`` or an ``sdist`` as pip does."""
    backend = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return out / run(sys.executable, "-c", backend, out, folder=tree).split()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the tree: a build leaves files behind."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("build") / "any name", ignore=OF_NO_TREE)


@pytest.fixture(scope="module")
def wheel(tree):
    return build("wheel", tree, tree.parent)


def import_from(site, folder):
    """Import echelon in a fresh process, from a folder treated as site-packages, ahead of those of this environment."""
    here = sysconfig.get_path("purelib")
    program = f"""
import site
site.addsitedir({str(site)!r})
site.addsitedir({here!r})
import echelon, echelon.callbacks, echelon.strategies, echelon.trainer.cli.main
print(echelon.__file__)
"""
    return Path(run(sys.executable, "-S", "-c", program, folder=folder).strip())


def source_files(tree):
    folders = [tree.joinpath(*package.split(".")[1:]) for package in PACKAGES]
    return {str(Path("echelon") / file.relative_to(tree)) for folder in folders for file in folder.glob("*.py")}


def installed_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def test_the_listed_packages_are_those_of_the_tree():
    files = [file.relative_to(ROOT) for file in ROOT.glob("[!.]*/**/*.py")]
    floors = {file.parts[0] for file in files if (ROOT / file.parts[0] / "__init__.py").exists()} - {"build"}
    folders = {file.parent for file in files if file.parts[0] in floors}
    assert sorted(PACKAGES) == sorted({"echelon", *(".".join(["echelon", *folder.parts]) for folder in folders)})
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


def test_the_wheel_holds_the_package_and_nothing_else(tree, wheel):
    assert installed_files(wheel) == {*source_files(tree), "echelon/py.typed", "echelon/examples/digits.py"}


def test_the_wheel_of_the_source_distribution_is_the_same(tree, wheel):
    shutil.unpack_archive(build("sdist", tree, tree.parent), tree.parent / "sdist", filter="data")
    (unpacked,) = (tree.parent / "sdist").iterdir()
    assert installed_files(build("wheel", unpacked, tree.parent / "sdist")) == installed_files(wheel)


PROGRAM = """
import pathlib, sys
import torch, echelon

assert pathlib.Path(echelon.__file__).is_relative_to(sys.prefix), echelon.__file__


class Line(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        self.log("ranks", float(self.trainer.world_size))
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = echelon.Trainer(strategy="ddp", devices=2, max_epochs=2, accelerator="cpu")
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2))
print("ranks", trainer.callback_metrics["ranks"].item(), "steps", trainer.global_step)
"""


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Install the wheel as a user does, with the packages that it needs; return the folder of its commands."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    (site / "needed.pth").write_text(str(Path(torch.__file__).parents[1]))
    pip("--python", python, "install", "--no-index", "--no-deps", wheel, folder=folder)
    return folder / "bin"


def test_an_installed_wheel_trains_on_two_processes_from_a_script_anywhere(environment, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    assert "ranks 2.0 steps 4" in run(environment / "python", "-W", "error", "train.py", folder=tmp_path)


@pytest.mark.only_in_sweep  # the script above trains with the wheel
def test_the_demo_of_an_installed_wheel_trains_tests_and_says_where_to_look(environment, tmp_path):
    output = run(environment / "echelon", "demo", "--epochs", "2", folder=tmp_path)
    assert float(re.search(r"accuracy/test +│ +([\d.]+)", output)[1]) > 0.8
    assert (tmp_path / re.search(r"Curves: +(\S+)", output)[1]).stat().st_size > 10_000
    logs = re.search(r"TensorBoard: +\S+ -m tensorboard.main --logdir (\S+)\n", output)[1]
    assert Path(logs) == (tmp_path / "echelon_logs").resolve()
    program = Path(re.search(r"The program: +(\S+)", output)[1])
    assert program.is_relative_to(environment.parent)
    assert program.read_text() == (ROOT / "examples" / "digits.py").read_text()


def test_an_editable_install_is_imported_from_any_folder(tree, tmp_path):
    site = tmp_path / "site"
    pip(
        "install",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        site,
        "--editable",
        tree,
        folder=tmp_path,
    )
    assert import_from(site, tmp_path) == tree / "__init__.py"


def test_the_metadata_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_string(archive.read(name).decode())
    assert metadata["Name"] == "echelon"
    assert metadata["Version"] == echelon.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert [str(requirement) for requirement in required if requirement.name == "torch"] == ["torch>=2.11"]
    assert all("extra ==" in str(requirement.marker) for requirement in required if requirement.name == "torchvision")
    licences = [file for file in archive.namelist() if file.endswith(".dist-info/licenses/LICENSE")]
    assert "Apache License" in archive.read(licences[0]).decode()


def test_ci_pins_every_requirement_to_one_version_that_fits():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines)
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    for requirement in REQUIREMENTS:
        if requirement.name != "echelon":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    assert (pinned["torch"], pinned["torchvision"]) == ("2.14.1", "0.29.1")
    assert "lightning" not in pinned
