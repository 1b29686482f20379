"""Every language model of transformers that a tiny config builds, in every layout against a plain loop, as a page.

Usage: ``python tests/libraries/sweep_families.py docs/families.md [--kinds causal masked seq2seq] [--only bert ...]``,
which ``make families`` runs. Each trains three SGD steps in float64, unmodified, in one process and on two ranks;
results are kept in the file of ``--found``, so that a sweep which was stopped goes on where it was.
"""

import argparse
import datetime
import json
import os
import re
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import EchelonError, ParallelStrategy
from echelon.testing import run_ranks

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

LAYOUTS = {
    "single": lambda: "single",
    "ddp 2": lambda: "ddp",
    "fsdp 2": lambda: "fsdp",
    "tp 2": lambda: ParallelStrategy(tp=2),
    "pp 2": lambda: ParallelStrategy(pp=2),
}
KINDS = {"causal": "Causal", "masked": "Masked", "seq2seq": "Encoder and decoder"}
CHUNK, SECONDS = 12, 40
"""Families of which two processes train one after the other, and the time after which a layout has hung."""
STARTED = "started"
WHOLE = "equal: with whole activations"
EQUAL = 1e-6
"""What is rounding: many models compute parts in float32 whatever their dtype."""


class Family(echelon.TrainModule):
    """A model with its own loss."""

    def __init__(self, kind, name):
        from sweep_losses_without_logits import build

        super().__init__()
        model = build(kind, name)
        self.lm = None if model is None else model.double().eval()  # without dropout
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch has no grouped products in float64

    def training_step(self, batch):
        return self.lm(input_ids=batch[0], labels=batch[1]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)  # larger steps make rounding grow


def samples():
    tokens = torch.randint(3, 90, (12, 16), generator=torch.Generator().manual_seed(1))
    return tokens, tokens


def by_hand(kind, name):
    """Return the weights after three steps, each the mean of two halves; None if the model does not build or train."""
    try:
        module = Family(kind, name)
        optimizer = module.configure_optimizers()
        for start in range(0, 12, 4):
            optimizer.zero_grad()
            for half in (slice(start, start + 2), slice(start + 2, start + 4)):
                (module.training_step([part[half] for part in samples()]) / 2).backward()
            optimizer.step()
    except Exception:  # noqa: BLE001 - these sizes, these tokens or float64 do not fit it
        return None
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def outcome(kind, name, layout, expected):
    """Return how a layout compares with a plain loop: equal, different, refused, or crashed."""
    trainer = echelon.Trainer(
        strategy=LAYOUTS[layout](), accelerator="cpu", precision="64-true", max_epochs=1, global_batch_size=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Family(kind, name), DataLoader(TensorDataset(*samples()), 2))
        found = trainer.strategy.full_model_state()
    except EchelonError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:  # noqa: BLE001 - a crash is what a sweep looks for
        if "gloo" in str(error):
            os._exit(1)  # the other process has gone: what ended it is the result
        return f"crashed: {type(error).__name__}: {' '.join(str(error).split())}"
    differences = [  # none but on the first rank
        apart(value.double(), expected[key].double())
        for key, value in found.items()
        if value.is_floating_point() and value.numel() and key in expected
    ]
    most = max(differences, default=0.0)
    if most >= EQUAL:
        return f"DIFFERENT: {most:.1g}"
    return WHOLE if any("with all heads and features" in str(one.message) for one in caught) else "equal"


def apart(value, expected):
    """Return the relative difference of two tensors; what is undefined in both is equal."""
    if torch.equal(value.isnan(), expected.isnan()):
        value, expected = value.nan_to_num(), expected.nan_to_num()
    return float((value - expected).abs().max() / (1 + expected.abs().max()))


def write(path, kind, name, layout, found):
    """Add a line to the results, on the first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        with path.open("a") as file:
            file.write(json.dumps([kind, name, layout, found]) + "\n")


def leave_if_alone(place):
    """End this process where only one of two has an error: the other waits for it, and so learns why.

    Each that stays has a step half done then, so that the next layout needs new processes.
    """
    if os.environ.get("WORLD_SIZE") != "2":
        return
    place.parent.mkdir(exist_ok=True)
    own, other = (place.with_name(f"{place.name} {rank}") for rank in (os.environ["RANK"], 1 - int(os.environ["RANK"])))
    own.touch()
    limit = time.monotonic() + 8
    while not other.exists():
        if time.monotonic() > limit:
            own.unlink()
            os._exit(1)
        time.sleep(0.05)
    time.sleep(0.2)  # until the other has seen this one's
    own.unlink()


def train(families, path):
    """Train families on this rank; the first rank adds a line a result to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    for (kind, name), lacking in families.items():
        expected = by_hand(kind, name)
        for layout in lacking:
            watch = threading.Timer(SECONDS, os._exit, [1])
            watch.start()
            write(path, kind, name, layout, STARTED)
            found = "not built" if expected is None else outcome(kind, name, layout, expected)
            watch.cancel()
            write(path, kind, name, layout, re.sub("Rank 0 of 2 lost the others: rank 1 failed with \\w+: ", "", found))
            if found.startswith(("refused", "crashed")):
                leave_if_alone(path.parent / "refusals" / f"{name} {layout}")


def results(path):
    """Return what is found so far, by model and layout."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(name, layout): found for _, name, layout, found in map(json.loads, lines)}


def sweep(families, path):
    """Train families that have no results yet, a chunk at a time; what ends a process is a result."""
    several = [layout for layout in LAYOUTS if layout != "single"]
    for start in range(0, len(families), CHUNK):
        for number_of_ranks, layouts in ((1, ["single"]), (2, several)):
            while todo := unfinished(families[start : start + CHUNK], layouts, results(path)):
                try:
                    run_ranks(train, number_of_ranks, todo, path, timeout=CHUNK * len(layouts) * SECONDS)
                except Exception as error:  # noqa: BLE001 - it is the result of a family, below
                    print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                for (kind, name), lacking in unfinished(todo, layouts, results(path)).items():
                    if results(path).get((name, lacking[0])) == STARTED:
                        write(path, kind, name, lacking[0], "crashed: a process ended, or hung")


def unfinished(families, layouts, found):
    """Return the layouts that families lack, by family, without families that lack none."""
    lacking = {
        one: [layout for layout in layouts if found.get((one[1], layout), STARTED) == STARTED] for one in families
    }
    return {one: layouts for one, layouts in lacking.items() if layouts}


def families_of(kinds, only):
    """Return the model types and class names of kinds, each class once."""
    from sweep_losses_without_logits import KINDS as CLASSES

    pairs = [(kind, kind_of, name) for kind in kinds for kind_of, name in CLASSES[kind].items()]
    named = {(name if isinstance(name, str) else name[0]): (kind, kind_of) for kind, kind_of, name in reversed(pairs)}
    return {name: place for name, place in sorted(named.items()) if not only or place[1] in only}


def page(families, found):
    """Return the page: counts, a table a kind, and the reasons by number."""
    import transformers

    reasons, parts, left = {}, [], 0
    for kind, title in KINDS.items():
        names = [name for name, place in families.items() if place[0] == kind]
        rows = {name: [found.get((name, layout), "not run") for layout in LAYOUTS] for name in names}
        left += sum("not run" in row or STARTED in row for row in rows.values())
        built = {name: row for name, row in rows.items() if not {"not built", "not run", STARTED} & {*row}}
        if not built:
            continue
        counts = [Counter(row[at].partition(":")[0] for row in built.values()) for at in range(len(LAYOUTS))]
        parts.append(f"## {title}\n\n| {len(built)} models | {' | '.join(LAYOUTS)} |\n|---|{'---|' * len(LAYOUTS)}")
        parts.append(f"| **equal** | {' | '.join(str(count['equal']) for count in counts)} |")
        for name, row in built.items():
            cells = []
            for one in row:
                word, _, text = one.partition(": ")
                whole = "equal, whole" if text else "equal"
                cells.append(whole if word == "equal" else f"{word} [{_number(text, reasons)}]")
            parts.append(f"| {name} | {' | '.join(cells)} |")
        parts[-1] += "\n"
    texts = "\n".join(_wrapped(f"{number}. {text}", "   ") for text, number in reasons.items())
    stopped = f" **The sweep was stopped before {left} of {len(families)} models.**" if left else ""
    today = datetime.datetime.now(datetime.UTC).date()
    said = _wrapped(
        f"Written by `make families` on {today}, with torch {torch.__version__} and "
        f"transformers {transformers.__version__}: every language model of transformers that a tiny config builds, "
        "unmodified, three steps of SGD in float64 in each layout against a plain loop. A number leads to [the "
        "reason](#reasons) of what is not equal; whole: [some activations are, on split "
        "weights](model_parallel.md#whole-activations-on-split-weights). What each layout is: [one process or "
        "many](parallel.md)." + stopped
    )
    return f"# Families of language models\n\n{said}\n\n" + "\n".join(parts) + f"\n## Reasons\n\n{texts}\n"


def _wrapped(text, indent=""):
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _number(text, reasons):
    """Return the number of a reason, in which names and numbers of one model do not count."""
    text = re.sub(r"^\w+Error: |\.? See the output there\.", "", text)
    text = re.sub(r"'?\b(lm\.[\w.]+(, )?)+'?", "... ", text)  # names of this model
    text = re.sub(r"\.\.\. [. ]+", "... ", text)
    text = re.sub(r"[<>|*`\[\]{}]", " ", text)
    text = re.sub(r" +", " ", re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "N", text))[:220].rstrip()
    return reasons.setdefault(text, len(reasons) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", help="model types, such as llama")
    parser.add_argument("--found", type=Path, default=Path("build/families.jsonl"))
    parser.add_argument("--write-only", action="store_true", help="write the page of what is found so far")
    options = parser.parse_args()
    options.found.parent.mkdir(parents=True, exist_ok=True)
    families = families_of(options.kinds, options.only)
    pairs = [(kind_of, name) for name, (_, kind_of) in families.items()]
    if not options.write_only:
        sweep(pairs, options.found)
    found = results(options.found)
    options.page.write_text(page(families, found))
    totals = Counter((layout, text.partition(":")[0]) for (_, layout), text in found.items())
    print("\n".join(f"{layout}: {number} {word}" for (layout, word), number in sorted(totals.items())))


if __name__ == "__main__":
    main()
