"""Release of this version: build, check in a fresh environment, tag, sign, publish; a dry run unless told otherwise.

``make release`` shows every step, does those that change nothing outside of ``dist/``, and prints the commands of the
others; ``make release PUBLISH=1`` runs those as well, and stops at the first finding. What the package index shows is
built from a copy of the commit, in which links of the README lead to files of the repository at that tag.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
RELEASED = ROOT / "tests" / "trainer" / "checkpoint" / "released"

ONE_PROCESS = ROOT / "tests" / "systems" / "one_process.py"
IS_INSTALLED = "import pathlib, sys, echelon; assert pathlib.Path(echelon.__file__).is_relative_to(sys.prefix)"


def version() -> str:
    """Return the version of this checkout."""
    text = (ROOT / "strategies" / "cluster" / "version.py").read_text()
    return text.split('VERSION: Final = "')[1].split('"')[0]


def notes(changelog: str, number: str) -> str:
    """Return the changelog's section of a version, or nothing if there is none."""
    found = re.search(rf"(?ms)^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog)
    return found[1].strip() if found else ""


def findings(number: str) -> list[str]:
    """Return what has to be done before this commit may be published."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    coming = re.search(r"(?ms)^## \[Unreleased\]\n(.*?)(?=^## )", changelog)
    found = []
    if git("status", "--porcelain"):
        found.append("the tree has changes: commit them")
    if git("tag", "--list", f"v{number}"):
        found.append(f"v{number} is tagged already: raise VERSION in strategies/cluster/version.py")
    if not notes(changelog, number):
        found.append(f"CHANGELOG.md has no section '## [{number}] - <date>'")
    if coming and coming[1].strip():
        found.append(f"[Unreleased] of CHANGELOG.md has entries: move them under [{number}]")
    if f"version: {number}\n" not in (ROOT / "CITATION.cff").read_text():
        found.append(f"CITATION.cff names another version than {number}")
    if not (RELEASED / number).is_dir():
        found.append(f"no checkpoint of {number} is kept: run tests/trainer/checkpoint/released_run.py")
    if not repository():
        found.append("git's remote 'origin' has no address of a web page, which the package and its links name")
    return found


def git(*words: str) -> str:
    """Return what git prints; nothing where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def page_of(remote: str) -> str:
    """Return the address of the page of a repository, from that of its remote; nothing if it has none to show."""
    found = re.fullmatch(r"(?:https://|ssh://git@|git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def repository() -> str:
    """Return the address of this repository's page."""
    return page_of(git("remote", "get-url", "origin"))


def with_links(readme: str, address: str, tag: str) -> str:
    """Return the README with links that lead from anywhere to the files of a tag; pictures to their bytes."""

    def rewritten(link: re.Match[str]) -> str:
        return f"{link[1]}]({address}/{'raw' if link[1].startswith('!') else 'blob'}/{tag}/{link[2]})"

    return re.sub(r"(!?\[[^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)", rewritten, readme)


def with_urls(pyproject: str, address: str, tag: str) -> str:
    """Return pyproject.toml with the addresses that the package index shows."""
    urls = {
        "Source": address,
        "Documentation": f"{address}/tree/{tag}/docs",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    table = "\n".join(f'{name} = "{url}"' for name, url in urls.items())
    return pyproject.replace("[project.scripts]", f"[project.urls]\n{table}\n\n[project.scripts]")


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command, shown as it is; end the release if it fails."""
    print("  $", shlex.join(map(str, command)), flush=True)
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}\nmake release: the command above failed with {done.returncode}.")
    return done.stdout.strip()


def build(copy: Path, tag: str) -> list[Path]:
    """Build source distribution and wheel from a copy of the commit, the wheel from what the former unpacks to."""
    archive = copy.parent / "commit.tar"
    run("git", "archive", "--output", archive, "HEAD")
    shutil.unpack_archive(archive, copy, filter="data")
    if address := repository():
        for name, rewrite in (("README.md", with_links), ("pyproject.toml", with_urls)):
            file = copy / name
            file.write_text(rewrite(file.read_text(), address, tag))
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", backend, DIST, folder=copy)
    (source,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(source, copy.parent / "sdist", filter="data")
    (unpacked,) = (copy.parent / "sdist").iterdir()
    words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", DIST, unpacked)
    run(sys.executable, "-m", "pip", *words)
    return [*DIST.glob("*.whl"), source]


def check(wheel: Path, folder: Path, *, whole: bool) -> None:
    """Install the wheel into a fresh environment, train, and resume there.

    Args:
        wheel: what was built.
        folder: an empty folder.
        whole: install what it needs as well, gigabytes of it; else those packages of this environment are seen.
    """
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet")
    if whole:
        run(*pip, "--constraint", ROOT / "constraints.txt", wheel)
    else:
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        places = {sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])}
        (site / "needed.pth").write_text("\n".join(places) + "\n")
        run(*pip, "--no-deps", "--no-index", wheel)
    print(" ", run(folder / "env" / "bin" / "echelon", "--version", folder=folder))
    run(python, "-c", IS_INSTALLED, folder=folder)
    print(" ", run(python, "-W", "error", ONE_PROCESS, folder=folder).splitlines()[-1])


def outward(commands: Sequence[Sequence[str | Path]], *, publish: bool) -> None:
    """Run what others will see, or print it."""
    for command in commands:
        if publish:
            print(run(*command))
        else:
            print("  would run:", shlex.join(map(str, command)))


def main() -> None:
    """Go through the steps of a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish", action="store_true", help="tag, sign and upload")
    publish = parser.parse_args().publish
    os.environ.pop("PYTHONPATH", None)
    number = version()
    tag = f"v{number}"
    print(f"1. Is {number} ready?")
    found = findings(number)
    print("\n".join(f"  before publishing: {finding}" for finding in found) or "  yes")
    if found and publish:
        raise SystemExit("make release: nothing was built; first do what is said above.")
    with tempfile.TemporaryDirectory() as scratch:
        print("2. Build")
        files = build(Path(scratch) / "commit", tag)
        sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
        (DIST / "SHA256SUMS").write_text(sums)
        (DIST / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), number) + "\n")
        for file in files:
            print(f"  {file.relative_to(ROOT)}  {file.stat().st_size / 1024:.0f} KB")
        print("3. Check the wheel in a fresh environment")
        check(files[0], Path(scratch), whole=publish)
    print("4. Tag and sign")
    signature = ("gpg", "--batch", "--yes", "--armor", "--detach-sign", DIST / "SHA256SUMS")
    outward([("git", "tag", "--sign", tag, "--file", DIST / "NOTES.md", "--cleanup=verbatim")], publish=publish)
    outward([signature], publish=publish)
    print("5. Publish")
    twine = (sys.executable, "-m", "twine")
    outward([(*twine, "check", "--strict", *files), ("git", "push", "origin", tag)], publish=publish)
    outward([(*twine, "upload", *files)], publish=publish)
    dry = "Nothing left this machine: a dry run. `make release PUBLISH=1` publishes."
    print(f"{tag} is published." if publish else dry)


if __name__ == "__main__":
    main()
