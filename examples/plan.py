"""Layouts that can train a GPT of 0.1 to 70 billion parameters on 8 GPUs of 80 GB, planned on a laptop, as a picture.

python examples/plan.py                               six sizes, in a few minutes, as gpt_layouts.png
python examples/plan.py --sizes 1B 7B --devices 64    two of them, on 8 nodes
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

CONFIG = Path(__file__).with_name("plan.yaml")
SIZES = {
    "0.1B": {"width": 768, "depth": 14},
    "0.4B": {"width": 1024, "depth": 30},
    "1B": {"width": 2048, "depth": 20},
    "7B": {"width": 4096, "depth": 34},
    "13B": {"width": 5120, "depth": 41},
    "70B": {"width": 8192, "depth": 86},
}
COLOURS = {"as it is": "#1b7837", "with a smaller micro-batch or recomputation": "#a6dba0", "not at all": "#f4a582"}


def planned(size, options):
    """Return the layouts that `echelon plan --json` prints for a size."""
    overrides = [f"module.{name}={value}" for name, value in SIZES[size].items()]
    machine = ["--devices", str(options.devices), "--memory", options.memory]
    command = [sys.executable, "-m", "echelon", "plan", str(CONFIG), *overrides, *machine, "--json"]
    # its exit code is 1 if nothing fits, which is a valid answer
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.stdout:
        sys.exit(done.stderr)
    return json.loads(done.stdout)["layouts"]


def best_of(layouts):
    """Return, for each layout, the bytes per device and how it fits, as a key of COLOURS."""
    batch = max(layout["micro_batch"] for layout in layouts)
    best = {}
    for layout in layouts:  # those that fit come first
        is_plain = layout["micro_batch"] == batch and "activation_checkpointing" not in layout["trainer"]
        how = "as it is" if is_plain else "with a smaller micro-batch or recomputation"
        found = layout["total"], how if layout["fits"] else "not at all"
        if layout["layout"] not in best or (layout["fits"] and is_plain):
            best[layout["layout"]] = found
    return best


def draw(answers, options):
    """Draw a row for each layout and a column for each size."""
    names = list(dict.fromkeys(name for answer in answers.values() for name in answer))
    figure, axes = plt.subplots(
        figsize=(2.8 + 1.15 * max(4, len(answers)), 1.8 + 0.36 * len(names)), layout="constrained"
    )
    for column, answer in enumerate(answers.values()):
        for row, name in enumerate(names):
            total, how = answer.get(name, (None, "not at all"))
            axes.add_patch(Rectangle((column, row), 0.96, 0.9, color=COLOURS[how] if total else "#eeeeee"))
            text = "-" if total is None else f"{total / 1e9:,.0f} GB" if total >= 1e10 else f"{total / 1e9:.1f} GB"
            colour = "white" if total and how == "as it is" else "black"
            axes.text(column + 0.48, row + 0.45, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xlim(0, len(answers))
    axes.set_ylim(len(names), 0)
    axes.set_xticks([column + 0.48 for column in range(len(answers))], list(answers))
    axes.set_yticks([row + 0.45 for row in range(len(names))], names, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(f"A GPT on {options.devices} devices of {options.memory}: what each holds", fontsize=11)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), ncols=3, loc="outside lower center", frameon=False, fontsize=8)
    figure.savefig(options.png, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--png", type=Path, default=Path("gpt_layouts.png"))
    options = parser.parse_args()

    answers = {}
    for size in options.sizes:
        answers[size] = best_of(planned(size, options))
        fitting = [name for name, (_, how) in answers[size].items() if how != "not at all"]
        print(f"{size}: {', '.join(fitting) or 'nothing fits'}", flush=True)
    draw(answers, options)
    print(f"Drawn as {options.png}.")
