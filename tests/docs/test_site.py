"""The site of `make docs`: its reference has every public name and argument, and a browser shows it."""

import html
import inspect
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import echelon
import echelon.testing

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (echelon.callbacks, echelon.strategies, echelon.testing, echelon)
    for name in getattr(module, "__all__", vars(module))
    if getattr(getattr(module, name), "__module__", "").startswith("echelon") and not name.startswith("_")
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build it; the pictures of the gallery come from runs that `make docs` makes."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--define"]
    command += ["suppress_warnings=image.not_readable", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=680, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Return, by name, the page of the reference that describes it."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    found = re.findall(r"^(\S+) py:\w+ \S+ (\S+)#", inventory, re.MULTILINE)
    return {name: (site / page).read_text() for name, page in found if name in PUBLIC}


ERRORS = {thing for thing in vars(echelon).values() if isinstance(thing, type) and issubclass(thing, Exception)}


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


def test_a_browser_shows_the_site(site, chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        failed = []
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.goto((site / "index.html").as_uri())
        assert page.locator("h1").first.inner_text().startswith("Echelon")
        page.get_by_role("link", name="Strategies", exact=True).first.click()
        page.locator("#echelon\\.FSDPStrategy").wait_for(state="visible")
        browser.close()
    assert failed == []
