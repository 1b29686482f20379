"""The steps of one process depend only on the global batch, not on how it is cut, read, watched or compiled."""

import random

import numpy as np
import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import Loss, TrainModule, seed_everything

CUTS = {
    "one batch of 32": (32, {}),
    "2 x 16 accumulated": (16, {"accumulate_grad_batches": 2}),
    "a global batch of 32 in 16s": (16, {"global_batch_size": 32}),
    "a global batch of 32 in 12s": (12, {"global_batch_size": 32}),
}


class Samples(Dataset):
    """Random samples, each with its index; with `noise`, random noise is added at each read."""

    def __init__(self, num_samples, noise=False):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(dim=1, keepdim=True))
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.randn(4) + random.random() + np.random.rand()
        return x, self.y[index], index


class Net(TrainModule):
    def __init__(self, optimizer="sgd", dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.optimizer = optimizer
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.seen.append(index)
        return self.loss(x, y)

    def loss(self, x, y):
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, nesterov=True)


def fit(module, loader, val_loader=None, **settings):
    trainer = quiet(**{"precision": "64-true", "max_epochs": 2, **settings})
    trainer.fit(module, loader, val_loader)
    return trainer


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def trained(cut, module=Net, num_samples=85, **settings):
    """Return the module and the trainer after training on global batches of 32 that are cut in this way."""
    batch_size, cut_settings = CUTS[cut]
    seed_everything(5)
    module = module() if callable(module) else module
    trainer = fit(module, DataLoader(Samples(num_samples), batch_size, shuffle=True), **cut_settings, **settings)
    return module, trainer


def by_hand(windows, num_samples, optimizer, clip):
    """Return the weights after a hand-written loop over these global batches."""
    seed_everything(5)
    module, data = Net(optimizer).double(), Samples(num_samples)
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        module.loss(data.x[window], data.y[window]).backward()
        if clip == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        elif clip == "value":
            nn.utils.clip_grad_value_(module.parameters(), 0.01)
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_samples", [64, 85])
def test_every_cut_of_the_global_batch_takes_the_steps_of_a_hand_written_loop(num_samples, optimizer, clip):
    settings = {"gradient_clip_algorithm": clip, "gradient_clip_val": 0.05 if clip == "norm" else 0.01} if clip else {}
    whole, _ = trained("one batch of 32", lambda: Net(optimizer), num_samples, **settings)
    expected = by_hand(whole.seen, num_samples, optimizer, clip)
    for cut in CUTS:
        module, trainer = trained(cut, lambda: Net(optimizer), num_samples, **settings)
        assert trainer.global_step == len(whole.seen)
        assert torch.equal(torch.cat(module.seen), torch.cat(whole.seen))
        torch.testing.assert_close(weights(module), expected, rtol=0, atol=1e-12)


class Weighted(Net):
    """Each sample counts a number of units that depends on its index; some micro-batches count none."""

    kind = "tensor"

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.seen.append(index)
        units = (index % 5 * (index > 3)).double()
        total = ((self(x) - y).square().squeeze(1) * units).sum()
        return Loss(total, units.sum() if self.kind == "tensor" else units.sum().item())


class WeightedByFloat(Weighted):
    kind = "float"


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("module", [Weighted, WeightedByFloat])
def test_a_loss_with_a_count_is_weighted_by_its_count_in_every_cut(module, clip):
    expected, _ = trained("one batch of 32", module, gradient_clip_val=clip)
    by_sample, _ = trained("one batch of 32", Net)
    assert not torch.allclose(weights(expected), weights(by_sample))
    for cut in CUTS:
        found, _ = trained(cut, module, gradient_clip_val=clip)
        torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-12)


def test_a_loss_with_a_count_is_exact_where_the_first_micro_batch_counts_nothing():
    def weights_of(batch_size, **settings):
        seed_everything(5)
        module = Weighted()
        fit(module, DataLoader(Samples(8), batch_size), **settings)
        return weights(module)

    torch.testing.assert_close(weights_of(4, accumulate_grad_batches=2), weights_of(8), rtol=0, atol=1e-12)


class Skipping(Net):
    """Skips micro-batches whose first index is divisible by 3."""

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if index[0] % 3 == 0:
            return None
        self.seen.append(index)
        return self.loss(x, y)


def test_a_skipped_micro_batch_has_no_weight():
    seed_everything(5)
    module = Skipping()
    trainer = fit(module, DataLoader(Samples(28), 4), accumulate_grad_batches=2, max_epochs=1)
    # micro-batches begin with 0, 4, 8, ..., 24; those that begin with 0, 12 and 24 are skipped
    windows = [range(4, 8), range(8, 12), range(16, 24)]
    assert trainer.global_step == 4  # a step without a loss counts, as in Lightning
    torch.testing.assert_close(weights(module), by_hand(map(list, windows), 28, "sgd", None), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:training_step returned None for all 4 batches")
def test_a_step_whose_micro_batches_are_all_skipped_counts_and_changes_nothing():
    class SkipsAll(Net):
        def training_step(self, batch, batch_idx):
            return None

    module = SkipsAll()
    before = weights(module.double())
    trainer = fit(module, DataLoader(Samples(8), 2), accumulate_grad_batches=2)
    assert trainer.global_step == 2 * trainer.max_epochs
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize(
    "workers", [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_random_augmentation_does_not_depend_on_the_workers(workers):
    def run(**options):
        seed_everything(5)
        module = Net(dropout=0.5)
        fit(module, DataLoader(Samples(20, noise=True), 4, shuffle=True, **options))
        return module

    alone, helped = run(), run(**workers)
    assert torch.equal(torch.cat(helped.seen), torch.cat(alone.seen))
    assert torch.equal(weights(helped), weights(alone))


def test_random_augmentation_does_not_depend_on_the_cut():
    def run(cut):
        batch_size, settings = CUTS[cut]
        seed_everything(5)
        module = Net()
        fit(module, DataLoader(Samples(85, noise=True), batch_size, shuffle=True), **settings)
        return weights(module)

    expected = run("one batch of 32")
    for cut in CUTS:
        torch.testing.assert_close(run(cut), expected, rtol=0, atol=1e-12)


class Validated(Net):
    def __init__(self):
        super().__init__(dropout=0.5)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch[0], batch[1]) + torch.rand(()))
        random.random()
        np.random.rand()


@pytest.mark.parametrize(
    "watched",
    [
        {"num_sanity_val_steps": 2},
        {"val_check_interval": 1},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.5, "limit_val_batches": 1},
        {"check_val_every_n_epoch": 2},
        {"log_every_n_steps": 1, "inference_mode": False, "detect_anomaly": True},
    ],
    ids=str,
)
def test_watching_a_run_does_not_change_it(watched):
    def run(**settings):
        seed_everything(5)
        module = Validated()
        data = DataLoader(Samples(20, noise=True), 4, shuffle=True)
        fit(module, data, DataLoader(Samples(8, noise=True), 4, shuffle=True), **settings)
        return weights(module)

    assert torch.equal(run(**watched), run(limit_val_batches=0))


def test_logs_checkpoints_and_displays_do_not_change_a_run(tmp_path):
    def run(**settings):
        seed_everything(5)
        module = Net(dropout=0.5)
        fit(module, DataLoader(Samples(20, noise=True), 4, shuffle=True), default_root_dir=tmp_path, **settings)
        return weights(module)

    shown = {"enable_progress_bar": True, "enable_model_summary": True, "profiler": "simple"}
    assert torch.equal(run(logger=True, enable_checkpointing=True, log_every_n_steps=1, **shown), run(barebones=True))


class WithoutForward(TrainModule):
    """The same net and steps, without a `forward` of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = Net().net, []

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("module", [Net, WithoutForward])
def test_a_compiled_module_takes_the_same_steps_under_the_same_names(module):
    graphs = []

    def eager(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected, _ = trained("one batch of 32", module)
    compiled, _ = trained("one batch of 32", module, compile={"backend": eager, "dynamic": True})
    assert graphs
    assert list(compiled.state_dict()) == list(expected.state_dict())
    torch.testing.assert_close(weights(compiled), weights(expected), rtol=0, atol=1e-12)


def test_compiled_gradients_take_the_same_steps():
    expected, _ = trained("one batch of 32")
    compiled, _ = trained("one batch of 32", compile={"backend": "aot_eager"})
    torch.testing.assert_close(weights(compiled), weights(expected), rtol=0, atol=1e-12)
