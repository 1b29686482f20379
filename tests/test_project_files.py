"""The files by which a host runs the project name what there is: tiers, targets, versions; and fit their schemas."""

import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for

import echelon

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+)(?=:(?!=))", MAKEFILE, re.MULTILINE))
CI = (ROOT / ".ci" / "run").read_text()
TIERS = set(re.findall(r"^([\w*-]+)\)", CI, re.MULTILINE)) - {"*"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def read(file):
    """Return the content of a YAML file with text for dates and versions, and `on` as a word."""
    return yaml.load(file.read_text(), Loader=yaml.BaseLoader)  # noqa: S506 - it makes strings only


def typed(file):
    """Return the content with the types that its schema asks for."""
    return json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))


@pytest.mark.parametrize(("schema", "file"), [(name, file) for name, files in SCHEMAS.items() for file in files])
def test_a_file_fits_its_schema(schema, file):
    content = typed(file)
    if "true" in content:  # YAML 1.1 reads the key `on` so
        content["on"] = content.pop("true")
    rules = get_builtin_schema(schema)
    assert [f"{list(error.path)}: {error.message}" for error in validator_for(rules)(rules).iter_errors(content)] == []


def jobs():
    return [(file, name, job) for file in WORKFLOWS for name, job in read(file)["jobs"].items()]


def commands(job):
    """Return what a job runs, once for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        command = step.get("run", "")
        (name,) = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", command) or [None]
        yield from [re.sub(r"\$\{\{.*?\}\}", value, command) for value in matrix[name]] if name else [command]


def test_workflows_run_tiers_that_there_are_and_every_tier_is_run():
    ran = [command for _, _, job in jobs() for command in commands(job) if ".ci/run" in command]
    tiers = [(command.split(".ci/run")[1].split() or ["all"])[0] for command in ran]
    assert {re.sub(r"^torch-.*", "torch-*", tier) for tier in tiers} == TIERS
    versions = {tier.removeprefix("torch-") for tier in tiers if tier.startswith("torch-")}
    assert versions == set(re.search(r"^TORCHES := (.*)", MAKEFILE, re.MULTILINE)[1].split())


def test_what_else_workflows_run_is_there_and_every_job_has_a_limit():
    for file, name, job in jobs():
        assert 0 < int(job["timeout-minutes"]) <= 180, (file.name, name)
        for command in commands(job):
            for program in re.findall(r"^python (\S+\.py)", command):
                assert (ROOT / program).is_file(), (file.name, name)


def test_ci_calls_targets_that_there_are():
    assert set(re.findall(r"\bmake ([\w-]+)", CI)) <= TARGETS
    done = subprocess.run(["bash", ".ci/run", "everything"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(tier.replace("*", "VERSION") in done.stderr for tier in TIERS)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"`make ([\w-]+)", contributing)) <= TARGETS


def test_the_versions_of_python_are_those_of_the_metadata():
    (matrix,) = [job["strategy"]["matrix"]["python"] for _, name, job in jobs() if name == "python"]
    named = [line.rpartition(" ")[2] for line in PYPROJECT["project"]["classifiers"] if "Python :: 3." in line]
    assert matrix == named
    assert PYPROJECT["project"]["requires-python"] == f">={matrix[0]}"


def test_a_report_asks_for_what_the_doctor_says():
    fields = read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]
    (machine,) = [field for field in fields if field.get("id") == "doctor"]
    assert "echelon doctor --json" in machine["attributes"]["description"]
    assert machine["validations"]["required"] == "true"


def test_editors_and_containers_use_what_the_project_uses():
    text = (ROOT / ".editorconfig").read_text()
    assert f"max_line_length = {PYPROJECT['tool']['ruff']['line-length']}\n" in text
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    extra = re.fullmatch(r"make \.venv/\.installed-(\w+)", container["postCreateCommand"])[1]
    assert extra in PYPROJECT["project"]["optional-dependencies"]


def test_the_version_is_the_same_everywhere_and_its_notes_take_two_minutes():
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == echelon.__version__ == RELEASE["version"]()
    assert f"## [{echelon.__version__}] - {citation['date-released']}\n" in CHANGELOG
    words = re.sub(r"\]\([^)]*\)", "", RELEASE["notes"](CHANGELOG, echelon.__version__)).split()
    assert 200 < len(words) < 480  # 240 a minute
    assert RELEASE["notes"](CHANGELOG, "0.0.1") == ""


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_its_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize(
    "remote",
    ["https://code.example/team/echelon.git", "git@code.example:team/echelon", "ssh://git@code.example/team/echelon"],
)
def test_what_the_index_shows_links_to_the_files_of_the_tag(remote):
    page = RELEASE["page_of"](remote)
    assert page == "https://code.example/team/echelon"
    text = "[a](docs/a.md#b) ![p](p.png) [c](#c) [d](https://d.example)"
    assert RELEASE["with_links"](text, page, "v1.2.3") == (
        f"[a]({page}/blob/v1.2.3/docs/a.md#b) ![p]({page}/raw/v1.2.3/p.png) [c](#c) [d](https://d.example)"
    )
    written = RELEASE["with_urls"]((ROOT / "pyproject.toml").read_text(), page, "v1.2.3")
    project = tomllib.loads(written)["project"]
    assert project["urls"]["Changelog"] == f"{page}/blob/v1.2.3/CHANGELOG.md"
    assert project["scripts"] == PYPROJECT["project"]["scripts"]


def test_a_remote_without_a_page_gives_no_address():
    assert RELEASE["page_of"]("/srv/git/echelon.git") == RELEASE["page_of"]("") == ""


def test_what_is_missing_for_a_release_is_named(tmp_path):
    number = echelon.__version__
    missing = RELEASE["findings"]("9.9.9")
    assert any("CHANGELOG.md has no section '## [9.9.9]" in line for line in missing)
    assert any("CITATION.cff names another version" in line for line in missing)
    assert any("no checkpoint of 9.9.9 is kept" in line for line in missing)
    ready = RELEASE["findings"](number)
    assert not any("CITATION" in line or "no section" in line or "no checkpoint" in line for line in ready)
