"""Every page of the documentation runs, top to bottom, as a reader would type it, and its links work."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch
from programs import run_program

import echelon
from echelon.strategies.placement import BY_NAME
from echelon.trainer import loggers
from echelon.trainer.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
RECIPES = sorted((ROOT / "docs/howto").glob("*.md"))  # test_howto.py runs them
OF_THE_SITE = {"index.md", "gallery.md"}  # which `make docs` builds, including pictures
SHORTER = {("demo",): ["demo", "--epochs", "1", "--strategy", "ddp", "--devices", "2"]}
"""In the place of a command, whose program tests/examples runs to its end and test_packaging.py in one process."""
IMPORT_MAIN = "from echelon.trainer.cli.main import main"


def blocks(page, *languages):
    """Return the fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def file_name(block):
    """Return the name in a first line such as ``# config.yaml``, which marks a block of a page as a file."""
    named = re.match(r"# (\w+\.(?:py|yaml))\n", block)
    return named[1] if named else None


def run(folder, *command):
    done = run_program(*command, folder=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


class Net(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def save_last_checkpoint(folder):
    saving = echelon.ModelCheckpoint(folder, save_last=True)
    trainer = echelon.Trainer(max_epochs=1, logger=False, enable_progress_bar=False, callbacks=saving)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 2)))
    trainer.save_checkpoint(folder / "one.ckpt", single_file=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if page.stem == "checkpoint-format":
        save_last_checkpoint(tmp_path)
    code = []
    for block in blocks(page, "python", "yaml"):
        name = file_name(block)
        if name is not None:
            (tmp_path / name).write_text(block)
        else:
            code.append(block)
    if code:
        (tmp_path / "page.py").write_text("\n".join(code))
        run(tmp_path, "-W", "error", "page.py")
    lines = [line.partition("  #")[0] for line in "".join(blocks(page, "bash")).splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("echelon ")]
    commands = [SHORTER.get(tuple(words), words) for words in commands]
    if commands:
        run(tmp_path, "-W", "error", "-c", f"{IMPORT_MAIN}\nfor words in {commands}: assert main(words) == 0")


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:|_pictures/)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, f"{page.name} links to #{anchor}; {target or 'it'} has {slugs}"


def test_the_badges_of_the_readme_are_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = re.findall(r"<text [^>]*>(.*?)</text>", (ROOT / "docs/badges.svg").read_text())
    shown = dict(zip(badges[::2], badges[1::2], strict=True))
    torch_needed = next(each for each in project["dependencies"] if each.startswith("torch>="))
    status = next(each for each in project["classifiers"] if each.startswith("Development Status"))
    assert "strict = True" in (ROOT / "setup.cfg").read_text()
    assert shown == {
        "Python": project["requires-python"].removeprefix(">=") + "+",
        "torch": torch_needed.removeprefix("torch>=") + "+",
        "types": "mypy --strict",
        "license": project["license"],
        "status": status.rpartition(" ")[2].lower(),
    }
    told = re.search(r"!\[(.*)\]\(docs/badges.svg\)", PAGES[0].read_text())
    assert told and told[1] == ", ".join(f"{name} {value}" for name, value in shown.items())


def test_the_first_program_of_the_readme_needs_what_is_installed_with_echelon():
    imported = re.findall(r"^(?:import|from) (\w+)", blocks(PAGES[0], "python")[0], re.MULTILINE)
    assert {*imported} == {"torch", "echelon"}


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\((?:docs/)?([\w-]+\.md)", PAGES[0].read_text()))
    assert linked | OF_THE_SITE == {page.name for page in PAGES[1:]}


SETTINGS = [name for name in inspect.signature(echelon.Trainer).parameters if name != "self"]
HOOKS = [name for name in vars(echelon.Callback) if not name.startswith("_") and "test" not in name]
CALLBACKS = [
    name
    for name, kind in vars(echelon.callbacks).items()
    if isinstance(kind, type) and issubclass(kind, echelon.Callback) and kind is not echelon.Callback
]
LOGGERS = [name for name in vars(loggers) if name.endswith("Logger")]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("trainer", SETTINGS),
        ("callbacks", [name for name in HOOKS if "predict" not in name]),
        ("callbacks", CALLBACKS),
        ("parallel", [f'"{name}"' for name in BY_NAME]),
        ("logging", LOGGERS),
        ("config", [f"echelon {name}" for name in COMMANDS]),
    ],
    ids=["settings", "hooks", "callbacks", "strategies", "loggers", "commands"],
)
def test_a_page_leaves_nothing_out(page, names):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [name for name in names if f"`{name}" not in text] == [], f"describe them in docs/{page}.md"
