"""Runs with cut sequences: with activation checkpointing, predictions, metrics, and what is refused."""

import pytest
import torch
from small import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, ModelCheckpoint, ModuleError, ParallelStrategy, TrainModule, seed_everything


class Model(TrainModule):
    """A causal model of three layers of torch's."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 32)

    def positions(self, length):
        return self.trainer.strategy.positions(length)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(self.positions(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("tokens", float(batch[0].numel()), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OwnPositions(Model):
    def positions(self, length):
        return torch.arange(length)


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def loader(length=16, num_samples=10):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (num_samples, length + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)


def seeded(module):
    seed_everything(3)
    return module()


def trained(strategy, module=Model, data=None, ckpt_path=None, max_epochs=2, **settings):
    module = seeded(module)
    trainer = quiet(strategy=strategy, max_epochs=max_epochs, precision="64-true", **settings)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize(
    ("exchange", "length"),
    [pytest.param("allgather", 16, marks=pytest.mark.only_in_sweep), ("allgather", 15), ("ulysses", 13)],
)
def test_recomputed_activations_attend_to_the_whole_sequence(exchange, length):
    expected, reference = trained("single", data=loader(length))
    strategy = ParallelStrategy(cp=2, cp_exchange=exchange)
    module, trainer = trained(strategy, data=loader(length), devices=2, activation_checkpointing="full")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-12, rtol=0)
    assert trainer.callback_metrics["tokens"] == reference.callback_metrics["tokens"] == 10 * length
    torch.testing.assert_close(trainer.callback_metrics["loss"], reference.callback_metrics["loss"])


@pytest.mark.parametrize("is_cut_first", [True, False])
def test_a_run_goes_on_with_whole_sequences_and_the_other_way_round(is_cut_first, tmp_path):
    expected, _ = trained("single")
    layouts = [{"strategy": ParallelStrategy(cp=2), "devices": 2}, {"strategy": "single"}]
    first, second = layouts if is_cut_first else layouts[::-1]
    saving = ModelCheckpoint(tmp_path)
    trained(**first, max_epochs=1, enable_checkpointing=True, callbacks=saving)
    module, _ = trained(**second, ckpt_path=saving.best_model_path)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-12, rtol=0)


def test_predictions_are_of_whole_sequences_each_once():
    module, trainer = trained(ParallelStrategy(cp=2), devices=2, max_epochs=1)
    seen = trainer.predict(module, loader())
    expected = quiet(strategy="single", precision="64-true").predict(module, loader())
    assert [prediction.shape for prediction in seen] == [prediction.shape for prediction in expected]
    for prediction, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(prediction, other, atol=1e-12, rtol=0)


def test_an_evaluation_equals_that_of_whole_sequences_or_is_refused():
    expected = quiet(strategy="single", precision="64-true").validate(seeded(Model), loader())
    trainer = quiet(strategy=ParallelStrategy(cp=2), precision="64-true", devices=2)
    assert trainer.validate(seeded(Model), loader()) == [pytest.approx(expected[0], rel=1e-12)]
    with pytest.raises(ModuleError, match="the first output that differs is that of places"):
        trainer.validate(seeded(OwnPositions), loader())


@pytest.mark.parametrize(
    ("module", "length", "error", "text"),
    [
        (OwnPositions, 16, ModuleError, "the first output that differs is that of places"),
        (Manual, 16, ConfigError, "needs a module with automatic_optimization=True"),
    ],
)
def test_what_cannot_be_cut_ends_the_run_with_the_remedy(module, length, error, text):
    with pytest.raises(error, match=text):
        trained(ParallelStrategy(cp=2), module, loader(length), devices=2)
