"""Programs of the pages: writes the Python of the README and of each recipe to build/pages, for ``make pyright``."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]


def program(page: Path) -> str:
    """Return the Python blocks of a page as one program, as a reader types them."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def main() -> None:
    """Write them anew."""
    folder = ROOT / "build" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in PAGES:
        if text := program(page):
            (folder / f"{page.stem.lower()}.py").write_text(text)


if __name__ == "__main__":
    main()
