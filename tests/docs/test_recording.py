"""The moving picture of the README: a real program on a terminal, replayed line by line, as one small SVG."""

import importlib
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[2] / "docs"
BAR = """
import sys, time
for done in range(3):
    sys.stdout.write(f"\\rEpoch {done}"); sys.stdout.flush(); time.sleep(0.05)
print("\\nbelow\\x1b[A\\rabove", "\\n\\nbest: \u2501 0.99")
"""


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    yield importlib.import_module("recording")
    sys.modules.pop("recording", None)


def test_a_screen_follows_returns_feeds_and_moves_up(recording):
    screen = recording.Screen(rows=3, columns=6)
    screen.write("first\r\n\rEpoch0\rEpoch1\r\n\rbelow\x1b[A\rE")
    assert screen.shown() == ["first", "Epoch1", "below"]
    screen.write("\r\n\r\nlonger than six")
    assert screen.shown() == ["longer", " than", "six"]  # it wraps, and the first lines have left
    with pytest.raises(ValueError, match="moves up only"):
        screen.write("\x1b[31mred")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_program_on_a_terminal_becomes_an_svg(recording, tmp_path):
    written = recording.record(["-c", BAR], tmp_path)
    film = recording.frames(written, "make it")
    assert film[0] == (0.0, ["$ make it"])
    assert film[-1][1] == ["$ make it", "above 2", "below", "best: \u2501 0.99", ""]
    assert [place for place, _ in film] == sorted(place for place, _ in film)
    picture = recording.draw(film, "a <title>")
    assert len([each for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("}g")]) == len(film) + 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_program_that_fails_is_an_error(recording, tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3; run it by hand"):
        recording.record(["-c", "raise SystemExit(3)"], tmp_path)


def test_the_picture_of_the_readme_is_small_and_ends_with_what_the_demo_prints(chromium):
    picture = (DOCS / "demo.svg").read_text()
    assert len(picture) < 64_000
    last = re.findall(r"<g transform=.*?</g>", picture)[-1]
    texts = dict(re.findall(r'<text id="(\w+)" [^>]*>(.*?)</text>', picture))
    shown = [texts[name] for name in re.findall(r'href="#(\w+)"', last)]
    accuracy = next(float(line.split("\u2502")[2]) for line in shown if "accuracy/test" in line)
    assert accuracy > 0.97
    assert any(line.startswith("Curves:") for line in shown)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(reduced_motion="reduce")  # the last frame stands still
        page.goto((DOCS / "demo.svg").as_uri())
        moved = page.evaluate("getComputedStyle(document.getElementById('film')).transform")
        browser.close()
    assert float(moved.split(",")[4]) < -10_000
