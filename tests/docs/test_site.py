"""The site of `make docs`: its reference has every public name and argument, and a browser shows it."""

import html
import inspect
import re
import threading
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from programs import run_program
from sweep import IS_SWEEP

import echelon
import echelon.testing

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (echelon.callbacks, echelon.strategies, echelon.testing, echelon)
    for name in getattr(module, "__all__", vars(module))
    if getattr(getattr(module, name), "__module__", "").startswith("echelon") and not name.startswith("_")
}


SETTINGS = {"suppress_warnings": "image.not_readable"}
"""The pictures of the gallery come from runs that `make docs` makes."""
QUICK = {
    "extensions": "myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon",
    "toc_object_entries": "0",
}
"""Without the pages of sources, and a list of methods in the margins, which take most of the time."""


pytestmark = pytest.mark.only_in_sweep  # `make docs` builds it, too


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build it; in a sweep as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    settings = SETTINGS if IS_SWEEP else SETTINGS | QUICK
    defined = [word for name, value in settings.items() for word in ("--define", f"{name}={value}")]
    words = ("-m", "sphinx", "--fail-on-warning", "--quiet", *defined, DOCS, folder)
    done = run_program(*words, folder=folder, timeout=680)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(site):
    """Return, by name, the page of the reference that describes it."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    found = re.findall(r"^(\S+) py:\w+ \S+ (\S+)#", inventory, re.MULTILINE)
    return {name: (site / page).read_text() for name, page in found if name in PUBLIC}


THINGS = [getattr(echelon, name) for name in echelon.__all__]
ERRORS = {thing for thing in THINGS if isinstance(thing, type) and issubclass(thing, Exception)}


@pytest.mark.sweep
def test_the_reference_has_every_public_name(pages):
    described = {id(PUBLIC[name]) for name in pages}  # under one of its names
    missing = [name for name, thing in PUBLIC.items() if id(thing) not in described]
    assert missing == [], "add them to a page of docs/reference/"


def test_the_reference_has_every_argument(pages):
    missing = []
    for name, page in pages.items():
        thing = PUBLIC[name]
        if f'id="{name}"' not in page or not callable(thing) or thing in ERRORS:
            continue
        described = html.unescape(re.sub(r"<[^>]+>", "", page[page.index(f'id="{name}"') :].partition("<dd><p>")[0]))
        parameters = [one for one in inspect.signature(thing).parameters if one not in ("self", "args", "kwargs")]
        missing += [f"{name}({one})" for one in parameters if not re.search(rf"\b{one}\b", described)]
    assert missing == []


def test_a_browser_shows_the_site(site, browser):
    page = browser.new_page()
    failed = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.goto((site / "index.html").as_uri())
    assert page.locator("h1").first.inner_text().startswith("Echelon")
    widths = page.locator("article img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert len(widths) == 2 and min(widths) > 100  # the badges and the moving picture of the README
    page.get_by_role("link", name="Strategies", exact=True).first.click()
    page.locator("#echelon\\.FSDPStrategy").wait_for(state="visible")
    page.close()
    assert failed == []


QUESTIONS = {
    "multiple gpus": "two_gpus",
    "how do i use multiple gpus": "two_gpus",
    "train on two gpus": "two_gpus",
    "use all gpus": "two_gpus",
    "out of memory": "out_of_memory",
    "gpu memory": "out_of_memory",
    "cuda out of memory": "out_of_memory",
    "save best model": "save_the_best_model",
    "best checkpoint": "save_the_best_model",
    "resume training": "resume_training",
    "continue from a checkpoint": "resume_training",
    "continue training after a crash": "resume_training",
    "loss is nan": "loss_is_nan",
    "exploding gradients": "loss_is_nan",
    "early stopping": "stop_early",
    "gradient accumulation": "accumulate_gradients",
    "warmup learning rate": "scheduler_per_step",
    "lr scheduler": "scheduler_per_step",
    "slow dataloader": "training_is_slow",
    "training is very slow": "training_is_slow",
    "gpu utilization": "training_is_slow",
    "huggingface": "fine_tune_hugging_face",
    "hugging face trainer": "from_hugging_face_trainer",
    "freeze layers": "freeze_and_unfreeze",
    "mixed precision": "mixed_precision",
    "fp16": "mixed_precision",
    "cross validation": "k_fold",
    "two optimizers": "train_a_gan",
    "custom training loop": "my_own_loop",
    "log images": "log_images",
    "inference": "use_the_trained_model",
    "slurm": "slurm",
    "multiple nodes": "several_nodes",
    "torchmetrics": "metrics_on_several_gpus",
    "migrate from lightning": "from_lightning",
    "accelerate": "from_accelerate",
    "plain pytorch": "from_a_hand_written_loop",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *words):
        pass


FOUND_FIRST = """questions => questions.map(question =>
    Search._performSearch(...Search._parseQuery(question)).at(-1)[0])"""
"""What the page of the search shows on top, without a load of that page for each question."""


@pytest.mark.sweep
def test_the_search_finds_a_recipe_by_the_words_of_a_newcomer(site, browser):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = next(iter(QUESTIONS))
    with server:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/search.html?q={asked}")
        first = page.locator("#search-results ul.search li a").first
        first.wait_for(timeout=60_000)
        shown, names = first.get_attribute("href"), page.evaluate(FOUND_FIRST, [*QUESTIONS])
        page.close()
        server.shutdown()
    assert re.sub(r"^(.*/)?howto/|\.html.*", "", shown) == QUESTIONS[asked]
    found = {question: name.removeprefix("howto/") for question, name in zip(QUESTIONS, names, strict=True)}
    assert found == QUESTIONS


def longest_line(recipe):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{recipe}.md").read_text(), re.MULTILINE | re.DOTALL)
    return max(len(line) for block in blocks for line in block.splitlines())


def widest():
    """Return the recipes with the longest lines of code, whose letters have one width; in a sweep all."""
    recipes = [f"howto/{recipe}" for recipe in dict.fromkeys(QUESTIONS.values())]
    return recipes if IS_SWEEP else sorted(recipes, key=longest_line)[-2:]


@pytest.mark.sweep
def test_code_is_whole_at_1400_pixels_and_can_be_copied(site, browser):
    is_cut = "all => all.filter(block => block.scrollWidth > block.clientWidth).map(block => block.innerText)"
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    for name in ("index", "module", *widest()):
        page.goto((site / f"{name}.html").as_uri())
        assert page.locator("div.highlight-python pre").count() > 0
        assert page.locator("div.highlight-python pre").evaluate_all(is_cut) == [], name
        assert page.locator("div.highlight button.copy").count() == page.locator("div.highlight pre").count()
    page.close()
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator("div.highlight-python button.copy").first.click()
    page.locator("button.copy", has_text="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    context.close()
    assert copied.startswith("import torch\n") and copied.rstrip().endswith("best_model_path)")
