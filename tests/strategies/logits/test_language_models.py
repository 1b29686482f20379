"""Language models trained without logits have the parameters of a plain loop that computes them, on every layout."""

import sys
from pathlib import Path

import pytest
import torch
from as_rank import calm_down
from sweep import dealt

from echelon import FSDPStrategy, ParallelStrategy
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("transformers")
from families import FAMILIES, train, train_by_hand

LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "tp": lambda: ParallelStrategy(tp=2),
    "pp": lambda: ParallelStrategy(pp=2),
    "cp": lambda: ParallelStrategy(cp=2),
}


ROUNDED = {"cohere": 1e-9}
"""The families that rotate queries and keys in float32, whatever the dtype, and how near that can be."""


def train_everywhere(pairs):
    calm_down()
    return {(family, layout): train(family, strategy=LAYOUTS[layout](), batch_size=2) for family, layout in pairs}


def check(pairs):
    found = run_ranks(train_everywhere, 2, pairs, timeout=500)[0]
    for family in dict.fromkeys(family for family, _ in pairs):
        by_hand = train_by_hand(family)
        found[family, "single"] = train(family)
        found[family, "accumulated"] = train(family, batch_size=1)
        for layout in ("single", "accumulated", *(layout for other, layout in pairs if other == family)):
            got = {name: value for name, value in found[family, layout].items() if name in by_hand}
            assert len(got) >= len(by_hand) - 1, (family, layout)  # a tied weight may be named once
            for name, value in got.items():
                torch.testing.assert_close(
                    value,
                    by_hand[name],
                    rtol=0,
                    atol=ROUNDED.get(family, 1e-12),
                    msg=lambda text, at=(family, layout, name): f"{at} {text}",
                )


@pytest.mark.only_in_sweep
def test_a_softcapped_model_trains_as_with_logits_on_every_layout():
    check([("gemma3", layout) for layout in LAYOUTS])


@pytest.mark.only_in_sweep  # the other tests of this file have the three families that most people train
@pytest.mark.sweep
@pytest.mark.slow
def test_eight_other_families_train_as_with_logits_on_layouts():
    check(dealt([family for family in FAMILIES if family != "gemma3"], list(LAYOUTS), (0, 2)))
