"""All layouts of both real models, with adapters, bf16, recomputation and deferred init, as a table of distances.

Not a test, since it takes minutes of CPU time: ``python tests/weights/every_layout.py FOLDER [ranks ...]``. Each line
is how far weights are from those of a loop by hand after two steps; tests/weights/test_real_weights.py has a part.
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
from as_rank import calm_down
from test_real_weights import BESIDE, KINDS, LAYOUTS, distance, prepare

from echelon.testing import run_ranks


def cases(num_ranks):
    """Return what trains on so many ranks: kind, name, strategy, settings."""
    for kind in KINDS:
        for name, (ranks, make, settings) in LAYOUTS.items():
            if ranks == num_ranks:
                yield kind, name, make, settings
                yield kind, f"{name}, adapters", make, {**settings, "adapters": True}
                yield kind, f"{name}, recomputed", make, {**settings, "activation_checkpointing": "full"}
        for name, (ranks, make, settings) in BESIDE.items():
            if ranks == num_ranks:
                yield kind, name, make, settings


def train_all(folder, num_ranks):
    calm_down()
    torch.set_num_threads(1)
    found = {}
    for kind, name, make, settings in cases(num_ranks):
        try:
            found[kind, name] = f"{distance(folder, kind, make(), **settings):.1e}"
        except Exception as error:  # noqa: BLE001 - a refusal is a result
            found[kind, name] = f"{type(error).__name__}: {str(error)[:300]}"
        print(kind, name, found[kind, name], file=sys.stderr, flush=True)
    return found


def main():
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    if not (folder / "minilm, bf16.pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, [(kind, "") for kind in KINDS])
    for num_ranks in map(int, sys.argv[2:] or (2, 3, 4)):
        for (kind, name), found in run_ranks(train_all, num_ranks, folder, num_ranks, timeout=3600)[0].items():
            print(f"{kind:10}{name:24}{found}", flush=True)


if __name__ == "__main__":
    main()
