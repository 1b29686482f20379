"""Time that `import echelon` adds to `import torch`, in fresh processes that take turns; prints medians in seconds."""

import argparse
import json
import statistics
import subprocess
import sys

PROBE = """
import time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
import echelon
print(torch_done - start, time.perf_counter() - torch_done)
"""


def measure() -> tuple[float, float]:
    """Return the seconds of `import torch` and of a following `import echelon`, in one fresh process."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    torch_seconds, added_seconds = map(float, done.stdout.split())
    return torch_seconds, added_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how many processes; the first only warms the disk cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rounds = [measure() for _ in range(options.rounds + 1)][1:]
    torch_seconds, added_seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
    if options.json:
        print(json.dumps({"torch_seconds": torch_seconds, "added_seconds": added_seconds}))
        return
    print(f"import torch     {torch_seconds:7.3f} s")
    print(f"import echelon  +{added_seconds:7.3f} s   {1 + added_seconds / torch_seconds:.3f}x")


if __name__ == "__main__":
    main()
