"""Guards find faults that nobody has thought of, and name the parameter, the part or the sample."""

import pytest
from put_in_faults import FAULTS, PROCESSES, run, run_all

from echelon.testing import run_ranks

APART = "Replicas differ after global_step"
SAID = {
    "a number nudged": (
        f"{APART} 4: the parameter blocks.1.down.weight[0, 5] is",
        "at global_step 1 they were still equal",
    ),
    "a rate of its own": (f"{APART} 1: the parameter embed.weight[0, 0] is",),
    "gradients scaled": (f"{APART} 1: the parameter head.weight[0, 0] is",),
    "a seed of its own": (f"{APART} 0: the parameter embed.weight[0, 0] is",),
    "averages apart": (f"{APART} 4: the parameter blocks.1.down.weight[0, 5] is",),
    "a repeated layer": (f"{APART} 4: the parameter", "on rank 1"),
    "a module-level mapping": ("as a whole on one rank",),
    "pooling": ("do not pool over the sequence",),
    "files in another order": ("Ranks 0 and 1 have different samples under the same indices",),
    "fewer samples": ("16", "14"),
    "a whole stream": ("Stream is dealt batch by batch: each of 2 readers",),
    "an object in a callback": ("Keeping", "seen"),
}
"""What runs say: their errors, or their warnings."""


@pytest.fixture(scope="module")
def said():
    return run_ranks(run_all, PROCESSES, timeout=240)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "an object in a callback"])
def test_a_fault_on_purpose_is_found_and_named(fault, said):
    found = said[0][fault] + said[1][fault]
    assert [word for word in SAID[fault] if word not in found] == [], found


def test_what_a_checkpoint_cannot_hold_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(0, "an object in a callback")
    assert found.startswith("after step 0: ")
    assert all(word in found for word in SAID["an object in a callback"]), found
