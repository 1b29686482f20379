"""Record of tests that passed only when they ran once more, alone; `.ci/run` fails on one that is there twice.

Usage: second_tries.py [FIRST NOW] [--forget TEST ...]
FIRST and NOW are pytest's lists of failed tests after the first run and after the second. The record lies outside of
the clone, as CI begins with a clean one: $ECHELON_SECOND_TRIES, or echelon/second_tries.tsv in the cache folder.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

KEPT = timedelta(days=30)


def record_file() -> Path:
    """Return where the record is kept."""
    if named := os.environ.get("ECHELON_SECOND_TRIES"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon" / "second_tries.tsv"


def failed(file: Path) -> set[str]:
    """Return the tests of pytest's list; there is none where no test has failed."""
    return set(json.loads(file.read_text())) if file.exists() else set()


def kept(file: Path, now: datetime) -> list[list[str]]:
    """Return what the record says of the last days: time, commit and test of each second try."""
    rows = [line.split("\t", 2) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if datetime.fromisoformat(row[0]) > now - KEPT]


def commit() -> str:
    """Return the commit that is tested, if this is a clone."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    """Change the record as the arguments say, print it, and return 1 if a test is there twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", type=Path, metavar="FIRST NOW")
    parser.add_argument("--forget", nargs="+", default=[], metavar="TEST", help="a test that was mended")
    options = parser.parse_args()
    if len(options.lists) not in (0, 2):
        parser.error(f"give the lists after both runs, or none; got {len(options.lists)}")
    file, now = record_file(), datetime.now(UTC)
    rows = [row for row in kept(file, now) if row[2] not in options.forget]
    if options.lists:
        first, second = map(failed, options.lists)
        rows += [[now.isoformat(timespec="seconds"), commit(), test] for test in sorted(first - second)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join("\t".join(row) + "\n" for row in rows))
    print(f"Second tries of the last {KEPT.days} days, in {file}: {len(rows)}")
    print("".join("  ".join(row) + "\n" for row in rows), end="")
    twice = [test for test, number in Counter(row[2] for row in rows).items() if number > 1]
    for test in twice:
        print(f"{test} needed a second try more than once: mend it, then run {sys.argv[0]} --forget '{test}'")
    return int(bool(twice))


if __name__ == "__main__":
    sys.exit(main())
