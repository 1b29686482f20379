"""The order of the data is a function of (seed, epoch); the user's own samplers and loaders are used as they are.

Both are departures from Lightning, which replays epoch 0 on resume and builds samplers and loaders again.
"""

import random

import pytest
import torch
from small import Regression, flat, indices, loader, quiet, samples
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

from echelon import seed_everything


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


# --- the order of the data is a function of (seed, epoch); a resumed run continues the very sequence ---


class Noisy(Regression):
    """Draws random numbers everywhere, and has dropout."""

    def __init__(self, noise=0):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.noise = noise

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        torch.rand(self.noise)
        random.random()
        return nn.functional.mse_loss(self.net(self.dropout(batch[0])), batch[1])


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(noise, seed=7, max_epochs=2):
        module = Noisy(noise)
        seed_everything(seed)
        quiet(max_epochs=max_epochs).fit(module, loader(8, 2, shuffle=True))
        return [flat(module.seen[4 * epoch : 4 * epoch + 4]) for epoch in range(max_epochs)]

    first, second = order(0)
    assert order(5) == [first, second]
    assert order(0, max_epochs=1) == [first]
    assert first != second
    assert order(0, seed=8) != [first, second]
    assert sorted(first) == sorted(second) == list(range(8))


def test_a_random_sampler_with_a_generator_depends_on_its_seed_and_the_epoch_alone():
    def order(num_drawn, max_epochs=2):
        generator = torch.Generator().manual_seed(3)
        sampler = WeightedRandomSampler(torch.ones(8), 8, generator=generator)
        torch.rand(num_drawn, generator=generator)
        module = Regression()
        quiet(max_epochs=max_epochs).fit(module, loader(8, 2, sampler=sampler))
        return flat(module.seen)

    assert order(0) == order(5)
    assert order(0)[:8] == order(0, max_epochs=1) != order(0)[8:]


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
def test_a_resumed_run_continues_the_very_sequence_of_samples_and_dropout(tmp_path, step):
    def fit(module, ckpt_path=None, **settings):
        trainer = quiet(max_epochs=3, **settings)
        trainer.fit(module, loader(8, 2, shuffle=True), ckpt_path=ckpt_path)
        return trainer

    seed_everything(1)
    whole = Noisy()
    fit(whole)
    seed_everything(1)
    begun = Noisy()
    fit(begun, max_steps=step).save_checkpoint(tmp_path / "begun.ckpt")
    seed_everything(99)
    resumed = Noisy()
    fit(resumed, tmp_path / "begun.ckpt")
    assert indices(begun.seen + resumed.seen) == indices(whole.seen)
    assert torch.equal(weights(resumed), weights(whole))


# --- samplers and loaders of the user are used, never built again ---


class Backwards(Sampler):
    made = 0

    def __init__(self, needed, size):
        type(self).made += 1
        self.needed, self.size = needed, size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class Evens(BatchSampler):
    def __init__(self, *, needed):
        self.needed = needed

    def __iter__(self):
        yield from ([0, 2, 4], [6])

    def __len__(self):
        return 2


class MyLoader(DataLoader):
    made = 0

    def __init__(self, needed, **options):
        type(self).made += 1
        super().__init__(**options)
        self.needed = needed


def test_a_sampler_is_used_as_it_is():
    Backwards.made, module = 0, Regression()
    quiet(max_epochs=2).fit(module, loader(5, 2, sampler=Backwards(None, 5)))
    assert indices(module.seen) == [[4, 3], [2, 1], [0]] * 2
    assert Backwards.made == 1


def test_a_batch_sampler_is_used_as_it_is():
    module = Regression()
    quiet(max_epochs=2).fit(module, DataLoader(samples(), batch_sampler=Evens(needed=1)))
    assert indices(module.seen) == [[0, 2, 4], [6]] * 2


def test_a_loader_of_a_class_of_the_users_is_left_as_it_was():
    MyLoader.made, module = 0, Regression()
    mine = MyLoader("needed", dataset=samples(6), batch_size=4, shuffle=True)
    before = dict(vars(mine))
    quiet(max_epochs=1).fit(module, mine)
    assert sorted(flat(module.seen)) == list(range(6))
    assert vars(mine) == before
    assert MyLoader.made == 1
