"""Runs that save to S3 on loopback and are killed at random moments."""

import os
import random
import time

import pytest
import torch
from programs import ForkedProgram
from server import environment
from store_program import STEPS, main

from echelon.common.storage import as_path
from echelon.trainer.checkpoint import list_checkpoints, verify

PROGRAM = os.path.join(os.path.dirname(__file__), "store_program.py")
PATIENCE = 120.0


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_loses_nothing(bucket, s3_server, tmp_path):
    chance, folder = random.Random(0), f"{bucket}/runs"
    (tmp_path / "peace").mkdir()
    main(str(tmp_path / "peace" / "checkpoints"), tmp_path / "peace")
    kills, code = 0, 1
    while code:
        (tmp_path / "begun").unlink(missing_ok=True)
        environ = {**os.environ, **environment(s3_server), "OMP_NUM_THREADS": "1"}
        program = ForkedProgram([PROGRAM, folder, tmp_path], folder=tmp_path, environ=environ, output=tmp_path / "log")
        end = time.monotonic() + PATIENCE
        while program.poll() is None and not (tmp_path / "begun").exists():
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.01)
        if kills < 10:
            time.sleep(chance.uniform(0.0, 1.2))
            if program.poll() is None:
                program.kill()
                kills += 1
        code = program.wait(PATIENCE)
        assert code <= 0, (tmp_path / "log").read_text()
        for found in list_checkpoints(folder):  # what is listed is complete
            verify(found.path)
    assert kills >= 5
    ours, theirs = torch.load(tmp_path / "weights.pt"), torch.load(tmp_path / "peace" / "weights.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = [found.path.name for found in list_checkpoints(folder)]
    assert [name.partition("step=")[2] for name in names] == [f"{STEPS - 2}.ckpt", f"{STEPS}.ckpt"]
    places = as_path(folder).find()
    assert {place.parts[3] for place in places} == {*names, "last.ckpt"}
    assert len(places) == 1 + sum(len(verify(as_path(folder) / name).files) + 2 for name in names)
