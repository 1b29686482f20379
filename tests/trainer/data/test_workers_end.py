"""The loaders' worker processes end with a run, even while the traceback of its error holds their iterators."""

import multiprocessing

import pytest
from small import Regression, loader, quiet


class Fails(Regression):
    def __init__(self, step):
        super().__init__()
        self.failing = step

    def training_step(self, batch, batch_idx):
        if self.failing == "training" and batch_idx == 1:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.failing == "validation":
            raise ZeroDivisionError


@pytest.fixture
def new_children():
    """Return a function that returns the processes that this test has started and that have not ended."""
    before = multiprocessing.active_children()
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.mark.parametrize("step", ["training", "validation"])
def test_workers_end_while_an_error_is_kept(step, new_children):
    with pytest.raises(ZeroDivisionError) as kept:
        quiet(max_epochs=1).fit(Fails(step), loader(16, num_workers=2), loader(num_workers=2))
    assert not new_children()
    assert kept.tb is not None


class FitsInside(Regression):
    """Trains another module, with workers, in the middle of its own epoch."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            with pytest.raises(ZeroDivisionError):
                quiet(max_epochs=1).fit(Fails("training"), loader(num_workers=2))
        self.steps += 1
        return super().training_step(batch, batch_idx)


def test_a_trainer_inside_another_leaves_the_others_workers(new_children):
    module = FitsInside()
    quiet(max_epochs=1).fit(module, loader(16, num_workers=2))
    assert module.steps == 8
    assert not new_children()


@pytest.mark.only_in_sweep
def test_persistent_workers_of_the_users_loader_read_the_next_run():
    validation = loader(16, num_workers=2, persistent_workers=True)
    for _ in range(2):
        quiet().validate(Regression(), validation, verbose=False)
    assert sum(1 for _ in validation) == 8
    validation._iterator = None
