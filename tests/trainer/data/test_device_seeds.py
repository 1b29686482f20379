"""Device generators: seeded by (seed, data rank), separate from those of an evaluation, and restored by rank."""

import pytest
import torch
from small import Regression, loader, quiet

from echelon.testing import run_ranks
from echelon.trainer.data.seed import capture_rng, isolated_rng, restore_rng, seed_devices

CUDA = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture
def generators(monkeypatch):
    """Generators that stand in for those of four devices."""
    made = tuple(torch.Generator() for _ in range(4))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    return made


def draws(generator):
    return torch.rand(3, generator=generator).tolist()


def test_each_data_rank_seeds_its_device_with_numbers_of_its_own_and_the_same_again(generators):
    drawn = []
    for _ in range(2):
        for data_rank in range(2):
            seed_devices([CUDA[data_rank]], 7, data_rank)
        drawn.append([draws(generators[0]), draws(generators[1])])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_ranks_that_share_their_data_draw_alike_wherever_their_device_is(generators):
    seed_devices([CUDA[0]], 7, 1)
    seed_devices([CUDA[3]], 7, 1)
    assert draws(generators[0]) == draws(generators[3])


def test_the_devices_of_one_process_draw_apart(generators):
    seed_devices(CUDA[:2], 7, 0)
    assert draws(generators[0]) != draws(generators[1])


def test_what_an_evaluation_draws_on_the_device_does_not_change_training(generators):
    seed_devices(CUDA[1:2], 7, 0)
    expected = draws(generators[1])
    seed_devices(CUDA[1:2], 7, 0)
    with isolated_rng(CUDA[1:2]):
        draws(generators[1])
    assert draws(generators[1]) == expected


def test_the_state_of_a_device_goes_with_the_rank_to_a_device_of_another_index(generators):
    seed_devices(CUDA[2:3], 7, 2)
    state = capture_rng(CUDA[2:3])
    expected = draws(generators[2])
    restore_rng(state, CUDA[:1])
    assert draws(generators[0]) == expected


def test_a_validation_inside_fit_isolates_the_device_of_the_strategy(generators, monkeypatch):
    """The module computes on the CPU; the strategy's devices are simulated."""

    class Draws(Regression):
        def validation_step(self, batch, batch_idx):
            torch.rand(3, generator=generators[0])

        def training_step(self, batch, batch_idx):
            self.seen.append(draws(generators[0]))
            return super().training_step(batch, batch_idx)

    drawn = []
    for validates in (False, True):
        trainer = quiet(max_epochs=1, val_check_interval=1, limit_val_batches=None if validates else 0)
        monkeypatch.setattr(type(trainer.strategy), "devices", property(lambda self: CUDA[:1]))
        module = Draws()
        trainer.fit(module, loader(), loader())
        drawn.append([seen for seen in module.seen if isinstance(seen[0], float)])
    assert drawn[0] == drawn[1]


def seeds_of_devices():
    calls = [entry[0] for entry in torch.cuda._lazy_seed_tracker.get_calls() if entry]
    return [cell.cell_contents for call in calls for cell in call.__closure__]


def test_workers_seed_their_devices_as_the_caller_did_before_anything_is_drawn():
    torch.manual_seed(1234)
    assert run_ranks(seeds_of_devices, 2) == [[1234], [1234]]
