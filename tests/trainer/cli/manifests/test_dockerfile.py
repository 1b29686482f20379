"""The Dockerfile: a linter finds nothing, and it copies what the package is built from. It cannot be built here."""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from printed import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
COPIED = [shlex.split(line)[1:-1] for line in re.findall(r"^COPY (?!--from).*$", TEXT, re.MULTILINE)]
SOURCES = [source for line in COPIED for source in line]


def test_hadolint_finds_nothing_wrong():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_that_the_package_is_built_from_is_copied_and_nothing_is_kept_from_it():
    assert [source for source in SOURCES if not list(ROOT.glob(source))] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    assert folders <= set(SOURCES)
    files = {*project["project"]["license-files"], *project["tool"]["setuptools"]["package-data"]["echelon"]}
    assert {project["project"]["readme"], *files, "*.py"} <= set(SOURCES)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [source for source in SOURCES if not any(fnmatch.fnmatch(source, one) for one in allowed)] == []


def test_the_last_stage_runs_without_root_and_without_a_shell_in_the_way():
    last = TEXT[TEXT.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    assert 'ENTRYPOINT ["echelon"]' in last


def test_the_last_stage_has_the_compiler_that_torch_compile_needs():
    last = TEXT[TEXT.rindex("\nFROM ") :]
    assert re.search(r"apt-get install .*\bg\+\+", last)
