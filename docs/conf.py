"""Settings of Sphinx, by which ``make docs`` builds the pages of this folder and the reference into docs/_build."""

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from torch import nn

import echelon

project, author = "Echelon", "the maintainers of Echelon"
project_copyright = author
version = release = echelon.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # of a notebook, what `_page_of` makes of it
html_theme = "furo"
html_static_path, html_css_files, html_js_files = ["static"], ["site.css"], ["copy.js"]
html_search_scorer = str(Path(__file__).parent / "static/scorer.js")
html_title = f"Echelon {release}"
html_copy_source = html_show_copyright = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings name things between single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 88

_DOCS = Path(__file__).parent
_OF_MODULES = frozenset(vars(nn.Module)) - {"forward"}
_IMAGE = re.compile(r"!\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _rewrite_links(text: str, folder: Path, shown_in: Path) -> str:
    """Let links, those of a text in `folder` that a page in `shown_in` shows, lead to pages of the site or to files.

    The files are copied, and pictures are shown; folders of the repository are named only.
    """

    def rewritten(link: re.Match[str]) -> str:
        label, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        is_page = target.suffix == ".md" and target.is_relative_to(_DOCS)
        if is_page or (target.is_file() and target.suffix != ".md"):
            return f"[{label}]({os.path.relpath(target, shown_in)}{anchor})"
        return label

    def moved(image: re.Match[str]) -> str:
        return f"![{image[1]}]({os.path.relpath(folder / image[2], shown_in)})"

    return _IMAGE.sub(moved, _LINK.sub(rewritten, text))


def _page_of(notebook: str) -> str:
    """Return a notebook as a page: its texts, its code, and what that has printed."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def _table_of(page: str) -> str:
    """Return the table of contents that leads, in the margin of the site, to what the page lists."""
    names = re.findall(r"^- \[.*\]\((\w+)\.md\)$", page, re.MULTILINE)
    return "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])


def _index_questions(page: str) -> str:
    """Enter what newcomers would ask a recipe for, its last paragraph, into the index that the search goes through.

    A phrase that is typed whole then leads to its recipe before any page that merely has its words.
    """
    asked = re.search(r"^Also asked as: (.*)\.\s*\Z", page, re.MULTILINE | re.DOTALL)
    if asked is None:
        return page
    phrases = [" ".join(phrase.split()) for phrase in asked[1].split(",")]
    return "```{index} " + ", ".join(f"! {phrase}" for phrase in phrases) + "\n```\n\n" + page


def _read_page(app: Sphinx, name: str, content: list[str]) -> None:
    if app.env.doc2path(name).suffix == ".ipynb":
        content[0] = _page_of(content[0])
    if name == "howto/index":
        content[0] += _table_of(content[0])
    elif name.startswith("howto/"):
        content[0] = _index_questions(content[0])
    if not name.startswith("reference/"):  # whose pages are written for the site
        folder = Path(app.env.doc2path(name)).parent
        content[0] = _rewrite_links(content[0], folder, folder)


def _read_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    content[0] = _rewrite_links(content[0], (_DOCS / path).resolve().parent, (_DOCS / page).parent)


def _is_left_out(app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out of the reference what a class inherits from outside of Echelon."""
    function = getattr(member, "fget", member)
    module = getattr(function, "__module__", None) or ""
    is_inherited = inspect.isroutine(function) and not module.startswith("echelon")
    return True if is_inherited or name in _OF_MODULES else None


def _signature_for_readers(
    app: Sphinx, kind: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Write ``Defaulted[T]``, a T for which None means the default, as Lightning's users know it: ``T | None``."""
    if signature is None or "Defaulted[" not in signature:
        return None
    return re.sub(r"Defaulted\[((?:[^\[\]]|\[(?:[^\[\]]|\[[^\]]*\])*\])*)\]", r"\1 | None", signature), returns


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-skip-member", _is_left_out)
    app.connect("autodoc-process-signature", _signature_for_readers)
