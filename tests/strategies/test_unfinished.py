"""A strategy whose run ended before it had a module: what can be asked of it works, all else says what to do."""

import copy
import pickle

import pytest
import torch
from small import Regression, loader, quiet

from echelon.common.errors import RunError

NEEDS_MODULE = {
    "model_state": lambda strategy: strategy.model_state(),
    "full_model_state": lambda strategy: strategy.full_model_state(),
    "load_model_state": lambda strategy: strategy.load_model_state({}),
    "module": lambda strategy: strategy.module,
    "placed": lambda strategy: strategy.placed.step_fn("training_step"),
    "positions": lambda strategy: strategy.positions(4),
}


class InterruptedInSetup(Regression):
    def setup(self, stage):
        raise KeyboardInterrupt


@pytest.fixture(scope="module", params=["single", "ddp", "fsdp", "zero", "local_sgd", "dp"])
def strategy(request):
    trainer = quiet(strategy=request.param, devices=1, max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(InterruptedInSetup(), loader())
    return trainer.strategy


@pytest.mark.parametrize("name", NEEDS_MODULE)
def test_what_needs_a_module_says_so(strategy, name):
    with pytest.raises(RunError, match=r"strategy\.(module|placed) must be set up by a run, found none yet"):
        NEEDS_MODULE[name](strategy)


def test_the_rest_works(strategy):
    assert (strategy.rank, strategy.world_size, strategy.device) == (0, 1, torch.device("cpu"))
    assert strategy.all_reduce(3) == 3
    strategy.barrier()
    strategy.close()
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied.name == strategy.name
    with pytest.raises(AttributeError, match="no_such_thing"):
        strategy.no_such_thing  # noqa: B018 - asking is the test
