"""Gathered copies generate the tokens of one process on every layout, as often as each rank wants to."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import ConfigError, Engine, FSDPStrategy, ParallelStrategy, RunError, TrainModule
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "pretrained"))
from tiny_models import build

pytest.importorskip("transformers")
TOKENS = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(3))
LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(deferred_init=True),
    "fsdp by hand": lambda: "fsdp",
    "tp and sequences": lambda: ParallelStrategy(tp=2, sequence_parallel=True),
    "pp": lambda: ParallelStrategy(pp=2),
}
IN_HOOKS = ("pp",)
"""The layouts whose steps have a part of the model."""


class Model(TrainModule):
    """Trains a model, and generates in hooks, and in steps where these have all of it."""

    def __init__(self, layout):
        super().__init__()
        self.layout, self.lm, self.made = layout, None, {}
        self.automatic_optimization = layout != "fsdp by hand"

    def configure_model(self):
        if self.lm is None:
            self.lm = build("llama")

    def training_step(self, batch, batch_idx):
        loss = self.lm(input_ids=batch[0], labels=batch[0]).loss
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def generate(self, prompts):
        with self.trainer.strategy.gathered(self.lm) as lm:
            assert not lm.training
            assert not any(type(part).__name__.startswith("FSDP") for part in lm.modules())
            lengths = [2 + int(prompt[0]) % 5 for prompt in prompts]
            pairs = zip(prompts, lengths, strict=True)
            return [lm.generate(p[None], max_new_tokens=n, do_sample=False)[0].tolist() for p, n in pairs]

    def validation_step(self, batch, batch_idx):
        if self.layout not in IN_HOOKS:
            for prompt, tokens in zip(batch[0], self.generate(batch[0]), strict=True):
                self.made[tuple(prompt.tolist())] = tokens
        return self.lm(input_ids=batch[0], labels=batch[0]).loss

    def on_validation_epoch_end(self):
        mine = TOKENS[self.trainer.strategy.rank :, : 3 + self.trainer.strategy.rank]  # as many as no other rank
        self.made["at the end"] = self.generate(mine)

    def predict_step(self, batch, batch_idx):
        return self.generate(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(layout, strategy):
    """Return what was generated in training, and in predictions after it."""
    torch.manual_seed(5)
    module, uneven = Model(layout), DataLoader(TensorDataset(TOKENS[:5]), 1)
    settings = {"global_batch_size": 8} if module.automatic_optimization else {}
    trainer = double_trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **settings)
    trainer.fit(module, DataLoader(TensorDataset(TOKENS), 4), uneven)
    made = {"at the end": module.made.pop("at the end"), "steps": module.made}
    if layout not in IN_HOOKS:
        made["predicted"] = trainer.predict(module, uneven)
    return made


def train_all():
    calm_down()
    return {layout: train(layout, make()) for layout, make in LAYOUTS.items()}


@pytest.fixture(scope="module")
def generated():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train("single", "single"), run_ranks(train_all, 2, timeout=400)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_process_in_hooks_steps_and_predictions(layout, generated):
    alone, ranks = generated
    by_rank = [each[layout] for each in ranks]
    assert len({len(tokens) for tokens in alone["at the end"]}) > 2  # they end at different lengths
    assert by_rank[0]["at the end"] == alone["at the end"]
    assert len(by_rank[1]["at the end"]) == 7
    if layout not in IN_HOOKS:
        assert {**by_rank[0]["steps"], **by_rank[1]["steps"]} == alone["steps"]
        assert by_rank[0]["predicted"] == alone["predicted"]


class Tokens(TrainModule):
    """Gathers a layer, or one that it does not have, in a step."""

    def __init__(self, other=None):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.other = (other,)

    def validation_step(self, batch, batch_idx):
        with self.trainer.strategy.gathered(self.other[0] or self.blocks):
            return self.blocks(batch[0]).mean()


def refuse(strategy, other):
    """Return the error of an evaluation."""
    try:
        data = DataLoader(TensorDataset(torch.ones(4, 4, 2, dtype=torch.float64)), 2)
        double_trainer(strategy=strategy).validate(Tokens(other), data)
    except echelon.EchelonError as error:
        return type(error), str(error)
    return None


def refuse_all():
    calm_down()
    strategies = {"pp": ParallelStrategy(pp=2), "cp": ParallelStrategy(cp=2), "fsdp": "fsdp", "ddp": "ddp"}
    return {name: refuse(each, nn.Linear(2, 2) if "dp" in name else None) for name, each in strategies.items()}


def test_where_a_step_has_a_part_only_and_where_a_module_is_no_part_it_is_refused_on_all_ranks():
    for found in run_ranks(refuse_all, 2, timeout=200):
        for name in ("pp", "cp"):
            kind, text = found[name]
            assert kind is RunError and "call it in a hook, such as on_validation_epoch_end" in text, name
        kind, text = found["fsdp"]
        assert kind is ConfigError and "must get a part of Tokens" in text
        assert found["ddp"] is None


def loop(engine):
    """Return what an engine's model generates, whole and by its part, and what it generates unsharded."""
    calm_down()
    torch.manual_seed(5)
    model = build("llama")
    inputs = TOKENS[:1, : 3 + engine.global_rank]
    expected = model.eval().generate(inputs, max_new_tokens=6, do_sample=False)
    model, optimizer = engine.setup(model.train(), torch.optim.SGD(model.parameters(), lr=0.0))
    model.mark_forward_method("generate")
    engine.backward(model(input_ids=TOKENS[:2], labels=TOKENS[:2]).loss)
    optimizer.step()
    with engine.gathered(model) as whole:
        assert type(whole).__mro__[1:] == type(build("llama")).__mro__[1:]
        for _ in range(1 + engine.global_rank):
            tokens = whole.generate(inputs, max_new_tokens=6, do_sample=False)
    with engine.gathered(model.model.embed_tokens) as embedding:
        rows = embedding(inputs)
    assert not list(embedding.parameters())  # what a variable keeps needs no memory
    assert model.training
    return torch.equal(tokens, expected), rows.shape


def test_an_engine_gathers_a_model_and_its_parts():
    assert Engine(strategy="fsdp", devices=2, accelerator="cpu").launch(loop) == (True, torch.Size([1, 3, 16]))
