"""The trainer has everything that hooks may ask of it."""

import pytest

from echelon import Trainer
from echelon.callbacks.run import Recoverable, Run
from echelon.callbacks.sample_ledger import SampleSource


@pytest.mark.parametrize("protocol", [Run, Recoverable, SampleSource])
def test_the_trainer_satisfies(protocol):
    asked = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    assert asked
    assert asked <= set(dir(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)))
