"""The examples keep their promises, as scripts and as configs of the ``echelon`` command."""

import importlib
import inspect
import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from PIL import Image
from playwright.sync_api import sync_playwright
from programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"


def run(folder, *command):
    done = run_program("-W", "error", *command, folder=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def accuracy_in(output):
    return float(re.search(r"accuracy/test\s+│\s+([\d.]+)", output)[1])


def is_drawn(path):
    """Whether a picture shows something."""
    with Image.open(path) as image:
        return image.width > 300 and len(image.convert("L").getcolors(256 * 256)) > 20


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run digits.py; return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run(folder, str(EXAMPLES / "digits.py"))


@pytest.mark.only_in_sweep  # `echelon demo` trains it for fewer epochs, in tests/test_packaging.py
def test_digits_reaches_97_percent_and_draws_its_curves(demo):
    folder, output = demo
    assert accuracy_in(output) >= 0.97
    assert is_drawn(folder / re.search(r"Curves: +(\S+)", output)[1])


@contextmanager
def serving(command, folder):
    """Start the TensorBoard command that an example prints, on a free port, and yield its address."""
    with subprocess.Popen(
        [*command.split(), "--port", "0"], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        try:
            yield next(filter(None, (re.search(r"http://\S+/", line) for line in server.stderr)))[0]
        finally:
            server.terminate()


@pytest.mark.only_in_sweep  # tests/trainer/loggers read what its page shows with its own readers
def test_the_tensorboard_page_of_digits_shows_its_scalars(demo, chromium):
    folder, output = demo
    command = re.search(r"TensorBoard: +(.+)", output)[1]
    with serving(command, folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 4000})
        page.goto(f"{address}?tagFilter=.#timeseries")  # with a filter, all of them are shown and none is folded up
        page.wait_for_function(
            "document.body.innerText.split('version_0').length > 10"
        )  # 9 curves and the list of runs
        texts = page.locator("card-view").all_inner_texts()
        browser.close()
    cards = {"".join(text.partition("Alt + Scroll")[0].split()): text for text in texts}
    names = {f"{metric}/{stage}" for metric in ("loss", "accuracy") for stage in ("train", "val", "test")}
    assert cards.keys() >= {"loss", "lr-AdamW", *names}
    assert all("400" in cards[name].split() for name in names)
    assert f"{accuracy_in(output):.4f}" in cards["accuracy/test"]


@pytest.mark.only_in_sweep  # tests/examples/test_gpt_example.py trains it in every layout
def test_gpt_learns_that_bytes_are_not_alike_and_prints_a_sample(tmp_path):
    output = run(tmp_path, str(EXAMPLES / "gpt.py"), "--max-steps", "8")
    loss = re.search(r"loss/train=([\d.]+)", output)
    assert loss and float(loss[1]) < 5.0  # the loss of a guess is ln 256 = 5.5
    assert len(output.partition("    def ")[2]) > 300


def test_gan_trains_both_networks_and_draws_samples(tmp_path):
    output = run(tmp_path, str(EXAMPLES / "gan.py"), "--max-epochs", "1")
    assert is_drawn(tmp_path / re.search(r"Samples: +(\S+)", output)[1])
    assert all(re.search(rf"loss/{network}=\d", output) for network in ("generator", "discriminator"))
    [checkpoint] = (tmp_path / "echelon_logs" / "version_0" / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert len(state["optimizers"]) == 2


@pytest.mark.parametrize("name", ["digits", "gpt", "gan"])
def test_an_example_is_a_config_too_and_overrides_reach_it(name, tmp_path):
    short = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=2")
    short += ("trainer.val_check_interval=2",)
    run(tmp_path, "-c", COMMAND, "fit", str(EXAMPLES / f"{name}.yaml"), "module.lr=1e-4", *short)
    folder = tmp_path / "echelon_logs" / "version_0"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["trainer"]["limit_train_batches"] == 2 and float(saved["module"]["lr"]) == 1e-4
    [checkpoint] = (folder / "checkpoints").iterdir()
    assert checkpoint.name.endswith("-step=2.ckpt")


@pytest.mark.parametrize("name", ["digits", "gpt", "gan"])
def test_a_config_spells_out_the_defaults_of_its_script(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module(name)
    config = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    for part in (config["module"], config["data"]):
        parameters = inspect.signature(getattr(module, part.pop("_target_").partition(".")[2])).parameters
        assert list(part) == list(parameters)
        assert all(value in (parameters[key].default, "${data.context}") for key, value in part.items())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_page_and_uses_public_names(path):
    text = path.read_text()
    assert len(text.splitlines()) < 150
    assert text.startswith('"""')
    assert not re.search(r"(from|import) echelon\.", text)
