"""Batches of random shapes, evaluations and checkpoints leave nothing behind: no files, threads, tensors or shapes."""

from __future__ import annotations

from pathlib import Path

from pipeline_leaks import MOST, train

from echelon.testing import run_ranks


def test_what_a_pipeline_holds_does_not_grow_with_its_steps(tmp_path: Path) -> None:
    _, second, _, last = run_ranks(train, 2, tmp_path, 24, timeout=400)[0]
    for name in ("files", "threads", "tensors"):
        assert last[name] <= second[name], name
    # one for each shape, in training and in evaluation
    assert second["shapes"] <= last["shapes"] <= 2 * (MOST - 1) ** 2
