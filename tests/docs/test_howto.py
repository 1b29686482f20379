"""Every recipe of docs/howto is one screen with one program, which runs as a newcomer would copy it."""

import os
import re
import socket
from pathlib import Path

import pytest
from programs import ForkedProgram, run_program

HOWTO = Path(__file__).parents[2] / "docs/howto"
RECIPES = {page.stem: page.read_text() for page in sorted(HOWTO.glob("*.md")) if page.stem != "index"}
OF_TRANSFORMERS = ["fine_tune_hugging_face", "from_hugging_face_trainer"]
OF_TWO_RANKS = ["two_gpus", "metrics_on_several_gpus"]
OF_TWO_NODES = "several_nodes"
OF_ONE_PROCESS = sorted({*RECIPES} - {*OF_TRANSFORMERS, *OF_TWO_RANKS, OF_TWO_NODES})

SCREEN = 60
"""Lines, of which a large terminal or a browser on a large screen shows as many at once."""
ONE_AFTER_THE_OTHER = """
import os, runpy
for name in {names}:
    print("recipe:", name, flush=True)
    os.chdir(os.path.join({folder!r}, name))
    runpy.run_path("train.py", run_name="__main__")
"""


def programs_of(name):
    return re.findall(r"^```python\n(.*?)^```$", RECIPES[name], re.MULTILINE | re.DOTALL)


def write(name, folder):
    (folder / name).mkdir()
    (folder / name / "train.py").write_text(programs_of(name)[0])
    return folder / name


@pytest.mark.parametrize(
    "names", [OF_ONE_PROCESS[::2], OF_ONE_PROCESS[1::2], OF_TRANSFORMERS], ids=["even", "odd", "transformers"]
)
def test_recipes_run_in_one_process(names, tmp_path):
    """They start nothing of their own; each finds itself alone in a folder, as `__main__`."""
    for name in names:
        write(name, tmp_path)
    code = ONE_AFTER_THE_OTHER.format(names=names, folder=str(tmp_path))
    done = run_program("-W", "error", "-c", code, folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.findall(r"^recipe: (\w+)$", done.stdout, re.MULTILINE) == names
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_a_recipe_of_two_ranks_runs(name, tmp_path):
    done = run_program("-W", "error", "train.py", folder=write(name, tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "2 processes, started by Echelon" in done.stdout


def test_a_recipe_of_two_nodes_runs(tmp_path):
    folder = write(OF_TWO_NODES, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = [
        ForkedProgram(
            ["-W", "error", "train.py"], folder=folder, environ={**where, "NODE_RANK": str(rank)}, output=output
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [node.wait(400.0) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    texts = [output.read_text() for output in outputs]
    assert codes == [0, 0], "\n".join(texts)
    assert [f"node rank {rank}: 4 steps" in text for rank, text in enumerate(texts)] == [True, True]


def test_there_are_recipes_for_what_newcomers_ask():
    assert len(RECIPES) >= 24
    listed = re.findall(r"^- \[(.*)\]\((\w+)\.md\)$", (HOWTO / "index.md").read_text(), re.MULTILINE)
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in RECIPES.items()}
    assert {name: title for title, name in listed} == titles


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_screen_with_one_program(name):
    lines = RECIPES[name].splitlines()
    assert len(programs_of(name)) == 1
    assert len(lines) <= SCREEN
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
    assert re.search(r"^Also asked as: [^.]*\.\n\Z", RECIPES[name], re.MULTILINE), "the search goes by it"
