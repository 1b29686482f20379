"""Amounts of samples and tokens are counted once and end, validate and save at the same steps in every layout."""

from itertools import pairwise

import pytest
import torch
from as_rank import double_trainer
from small import raises
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import (
    Callback,
    ConfigError,
    ElasticStrategy,
    LocalSGDStrategy,
    Loss,
    ModelCheckpoint,
    ParallelStrategy,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

pytestmark = pytest.mark.slow

LENGTHS = [4 + 5 * number % 13 for number in range(25)]
TEXTS = [torch.arange(1, length + 1) * (3 + number) % 23 + 1 for number, length in enumerate(LENGTHS)]
TOTAL = sum(LENGTHS)
LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "tp": lambda: ParallelStrategy(tp=2),
    "cp": lambda: ParallelStrategy(cp=2),
    "pp": lambda: ParallelStrategy(pp=2),
}
LIMITS = {
    "tokens": {"max_tokens": 2 * TOTAL - 60, "val_check_interval": "90 tokens", "log_every_n_steps": "60 tokens"},
    "samples": {"max_samples": 43, "val_check_interval": "9 samples", "log_every_n_steps": "7 samples"},
}
CASES = [case for case in dealt(list(LAYOUTS), list(LIMITS), [0]) if IS_SWEEP or case[0] not in ("ddp", "tp")]
BUDGETED = [("fsdp", 4), ("tp", 2), ("cp", 2)] if IS_SWEEP else [("tp", 2), ("cp", 2)]
"""Layouts with limits, of which "ddp" is elastic as well, and with budgets and the batch size of one process."""
SAVES = {"tokens": "70 tokens", "samples": "10 samples"}
BUDGET = 80


class Block(nn.Module):
    """Causal attention with one head a rank, and a perceptron, with names that tensor parallelism knows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        heads = (
            project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Model(TrainModule):
    """A small decoder whose loss is a mean over tokens that are no padding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(25, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 25)

    def training_step(self, batch, batch_idx):
        x = self.token(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        losses = F.cross_entropy(self.head(x).transpose(1, 2), batch["labels"], reduction="none")
        return Loss((losses * batch["attention_mask"]).sum(), batch["attention_mask"].sum())

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Amounts(Callback):
    """Notes what was seen after each step, whether loggers got its values, and what was seen at each validation."""

    def __init__(self):
        self.steps, self.validated = [], []

    def on_train_step_end(self, trainer, module):
        if not self.steps or self.steps[-1][0] != trainer.global_step:
            self.steps.append((trainer.global_step, trainer.samples_seen, trainer.tokens_seen, trainer.is_log_step))

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append((trainer.global_step, trainer.samples_seen, trainer.tokens_seen))


def pad(samples):
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1)), "attention_mask": (ids > 0).long()}


def loader(batch_size):
    return DataLoader(TEXTS, batch_size, shuffle=True, collate_fn=pad)


def fit(strategy, settings, batch_size=2, ckpt_path=None, saves=None, folder=None):
    """Return what was seen and when, the steps of checkpoints, and the weights."""
    seed_everything(5, verbose=False)
    amounts, module = Amounts(), Model()
    callbacks = [amounts]
    if saves is not None:
        callbacks.append(ModelCheckpoint(folder, save_top_k=-1, train_time_interval=saves))
        settings = {**settings, "enable_checkpointing": True}
    trainer = double_trainer(strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(module, loader(batch_size), DataLoader(TEXTS[:2], 2, collate_fn=pad), ckpt_path=ckpt_path)
    # processes that `fit` has started return their weights into the module
    is_launched = isinstance(strategy, ElasticStrategy)
    weights = module.state_dict() if is_launched else trainer.strategy.full_model_state()
    names = [path.name for path in folder.glob("*step=*")] if folder else []
    saved = sorted(int(name.split("step=")[1].removesuffix(".ckpt")) for name in names)
    return (amounts.steps, amounts.validated, saved), weights, trainer


def fit_by(unit, strategy, folder, **settings):
    limits = {"global_batch_size": 4, **LIMITS[unit], **settings}
    return fit(strategy, limits, saves=SAVES[unit], folder=folder)


def fit_to_a_budget(strategy, batch_size):
    settings = {"accumulate_tokens": BUDGET, "max_epochs": 2}
    seen, weights, _ = fit(strategy, settings, batch_size)
    return seen[0], weights


def in_layouts(folder):
    found = {}
    for name, unit in CASES:
        here, make = folder / f"{name}-{unit}", LAYOUTS[name]
        seen, weights, _ = fit_by(unit, make(), here)
        found[name, unit] = seen, weights
        at = seen[2][1]  # the step of its second checkpoint
        settings = {"global_batch_size": 4, **LIMITS[unit]}
        rest, resumed, _ = fit(make(), settings, ckpt_path=next(here.glob(f"*step={at}.ckpt")))
        before = ([entry for entry in entries if entry[0] <= at] for entries in seen[:2])
        found[name, unit, "resumed"] = (*(a + b for a, b in zip(before, rest[:2], strict=True)),), resumed
    for name, _ in BUDGETED:
        found[name, "budget"] = fit_to_a_budget(LAYOUTS[name](), 2)
    with raises(ConfigError, "A pipeline has the same number of micro-batches", "accumulate_tokens with pp=2"):
        fit_to_a_budget(ParallelStrategy(pp=2), 2)
    found["local_sgd"] = fit_by("tokens", LocalSGDStrategy(period=2), folder / "local")[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def found(folder):
    return run_ranks(in_layouts, 2, folder, timeout=400)


@pytest.fixture(scope="module")
def alone(folder):
    return {unit: fit_by(unit, "single", folder / f"single-{unit}")[:2] for unit in LIMITS}


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "unit"), CASES)
def test_a_layout_ends_validates_and_saves_as_one_process(name, unit, found, alone):
    seen, weights = alone[unit]
    steps, validated, saved = seen
    assert len(steps) > 8 and len(validated) > 3 and len(saved) > 3
    limit = next(iter(LIMITS[unit].values()))
    place, every = (2, 60) if unit == "tokens" else (1, 7)
    counted = [0, *(step[place] for step in steps)]
    due = [now // every > before // every for before, now in pairwise(counted)]
    assert [is_logged for *_, is_logged in steps] == due and 3 < sum(due) < len(due)
    assert steps[-1][place] >= limit > steps[-2][place]
    for rank in found:
        assert rank[name, unit][0] == seen
        assert rank[name, unit, "resumed"][0] == seen[:2]
    assert_same(found[0][name, unit][1], weights)
    assert_same(found[0][name, unit, "resumed"][1], weights)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "batch_size"), BUDGETED)
def test_a_layout_reaches_a_budget_of_tokens_as_one_process(name, batch_size, found):
    # a micro-batch of two data ranks is one of twice the size
    steps, weights = fit_to_a_budget("single", batch_size)
    assert len(steps) > 4 and steps[-1][2] == 2 * TOTAL
    for rank in found:
        assert rank[name, "budget"][0] == steps
    assert_same(found[0][name, "budget"][1], weights)


def test_replicas_that_step_apart_count_the_tokens_of_all(found, alone):
    for rank in found:
        assert rank["local_sgd"] == alone["tokens"][0]


def test_an_elastic_run_counts_the_tokens_of_restarted_steps_once(folder, alone):
    strategy = ElasticStrategy("ddp", snapshot_every=2, chaos="kill:rank=1@step=5")
    limits = {"global_batch_size": 4, "devices": 2, **LIMITS["tokens"]}
    (_, _, saved), weights, trainer = fit(strategy, limits, saves=SAVES["tokens"], folder=folder / "elastic")
    (steps, _, expected), whole = alone["tokens"]
    assert (trainer.global_step, trainer.samples_seen, trainer.tokens_seen) == steps[-1][:3]
    assert saved == expected
    assert_same(weights, whole)
