"""Blocks that cannot compute with some heads or features compute with all, on weights that stay cut, and are equal."""

import math
import warnings

import pytest
import torch
from as_rank import calm_down
from cut_run import fit_words
from once import once
from sweep import dealt
from torch import nn
from torch.nn import functional as F

from echelon import ModuleError, TrainModule
from echelon.strategies.state.dtensor import is_dtensor
from echelon.testing import run_ranks

WORDS, WIDTH, HEADS, KEY_HEADS = 12, 16, 4, 2


class Sinks(nn.Module):
    """An attention with one weight for each head, and fewer heads of keys."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.n_kv_heads = HEADS, KEY_HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH * KEY_HEADS // HEADS) for _ in range(2))
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.num_heads // self.n_kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        sinks = self.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return x + self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """Projections packed in one layer, with a fixed number of heads, and a bias of the scores for each."""

    def __init__(self):
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.linspace(0.1, 1, HEADS)[:, None, None])

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.Wqkv(x).chunk(3, -1))
        positions = torch.arange(x.shape[1], dtype=x.dtype)
        bias = self.slopes * (positions[None] - positions[:, None])
        return x + self.out_proj((q @ k.mT + bias).softmax(-1).matmul(v).transpose(1, 2).reshape(x.shape))


class Normed(nn.Module):
    """A feed-forward part with a norm over all of its features, which changes the result without an error."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Linear(1, 1)

    def forward(self, x):
        hidden = self.up_proj(x).relu()
        return x + self.down_proj(self.scale(hidden.mean(-1, keepdim=True)) + hidden)


class Recurrent(nn.Module):
    """Layers of no known names, one of which gives its weight away."""

    def __init__(self):
        super().__init__()
        self.into, self.back, self.given = nn.Linear(WIDTH, 80), nn.Linear(80, WIDTH), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x):
        return x + self.back(self.into(x).cumsum(1).tanh()) + F.linear(x, self.given.weight).sum(-1, keepdim=True)


class Unnamed(nn.Module):
    """A norm for each head, for which no plan has a word: its gradients are sums over the ranks."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_each = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).mT for f in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj((self.of_each((q * k).mT.tanh()) * v.mT).flatten(2))


class Words(TrainModule):
    """Blocks of one kind between a table and a head."""

    def __init__(self, kind, *, validates=False):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(kind() for _ in range(2)))
        self.validates = validates

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)))

    def training_step(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch):
        self.log("val_loss", self.training_step(batch), on_epoch=True)

    def val_dataloader(self):
        return self.trainer.train_dataloader if self.validates else []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


KINDS = {
    "a weight for each head": Sinks,
    "packed": Packed,
    "a mean of features": Normed,
    "no known names": Recurrent,
    "a norm without a word": Unnamed,
}
CUT = {"q_proj", "k_proj", "v_proj", "o_proj", "Wqkv", "out_proj", "up_proj", "down_proj", "into", "back"}


LAYOUTS = {
    "tp 2": (2, {"tp": 2}),
    "tp 4, where two ranks hold a head": (4, {"tp": 4}),
    "fsdp 2 x tp 2": (4, {"dp_shard": 2, "tp": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
}


def kinds_of(layout):
    """Return what is trained on a layout: on two ranks all, and some of it on four."""
    taken = [(name, layout) for name in KINDS] if layout == "tp 2" else dealt(list(KINDS), list(LAYOUTS)[1:], [0])
    return [name for name, where in taken if where == layout]


def train_on(layout, folder):
    """Return, by kind, this rank's whole weights, which are cut, and what was warned of."""
    found, degrees = {}, LAYOUTS[layout][1]
    for name in kinds_of(layout):
        path = folder / f"{name} {layout}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, module, _, state = fit_words(lambda name=name: Words(KINDS[name]), WORDS, path=path, **degrees)
        cut = {key.split(".")[-2] for key, p in module.named_parameters() if is_dtensor(p) and key.endswith("weight")}
        said = [str(one.message) for one in caught if "computes with all heads" in str(one.message)]
        found[name] = state, cut & CUT, said
    return found


def on_ranks(number, folder):
    calm_down()
    return {layout: train_on(layout, folder) for layout, (size, _) in LAYOUTS.items() if size == number}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what the first of a number of ranks has, by layout, and where its checkpoints are; they start once."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, once(lambda number: run_ranks(on_ranks, number, number, folder, timeout=300)[0])


@pytest.fixture(scope="module")
def alone():
    """Return the weights of a kind in one process after a number of epochs."""
    return once(lambda case: fit_words(lambda: Words(KINDS[case[0]]), WORDS, epochs=case[1])[3])


def apart(state, expected):
    return max((float((state[key] - expected[key]).abs().max()) for key in state), default=0.0)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_as_in_one_process(layout, trained, alone):
    folder, ends = trained
    found = ends(LAYOUTS[layout][0])[layout]
    assert found.keys() == {*kinds_of(layout)}
    for name, (state, cut, said) in found.items():
        assert state
        assert apart(state, alone((name, 2))) < 1e-12, name
        kind = KINDS[name].__name__
        assert (cut != set()) or "fsdp" in layout, name
        if kind in ("Recurrent", "Unnamed"):  # as planned, or with gradients that are summed
            assert said == []
        else:
            assert len(said) == 1 and f"{kind} ('blocks.0') computes with all heads and features" in said[0], said
    # a checkpoint goes on in one process
    for name in found:
        path = folder / f"{name} {layout}"
        state = fit_words(lambda name=name: Words(KINDS[name]), WORDS, ckpt_path=path, epochs=3)[3]
        assert apart(state, alone((name, 3))) < 1e-12, name


def evaluated_first(strategy_is_cut):
    calm_down()
    from as_rank import double_trainer

    from echelon import ParallelStrategy, seed_everything

    seed_everything(1, verbose=False)
    tokens = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (8, 6)))
    loader = torch.utils.data.DataLoader(tokens, 4)
    settings = {"strategy": ParallelStrategy(tp=2)} if strategy_is_cut else {"strategy": "single"}
    results = []
    for kind in (Sinks, Normed):
        seed_everything(1, verbose=False)
        module = Words(kind)
        trainer = double_trainer(max_epochs=1, num_sanity_val_steps=2, **settings)
        results.append(trainer.validate(module, loader)[0]["val_loss"])
        trainer.fit(module, loader, loader)
        results.append(float(trainer.callback_metrics["val_loss"]))
    return results


def test_an_evaluation_before_training_finds_it_too():
    expected = run_ranks(evaluated_first, 1, False)[0]
    found = run_ranks(evaluated_first, 2, True)[0]
    assert found == pytest.approx(expected, abs=1e-12)


class Mistaken(Words):
    """A plan that its author has written is taken by the letter."""

    tp_plan = {"blocks.*.up_proj": "colwise", "blocks.*.down_proj": "rowwise"}  # noqa: RUF012


def with_a_plan_of_its_own():
    calm_down()
    with pytest.raises(ModuleError, match=r"'blocks\.0' \(Normed\) does not compute the same .*Mistaken\.tp_plan"):
        fit_words(lambda: Mistaken(Normed), WORDS, tp=2)
    with pytest.raises(ModuleError, match="a shard of them"):
        fit_words(lambda: Words(Normed), WORDS, tp=2, sequence_parallel=True)


def test_neither_a_given_plan_nor_one_with_shards_of_sequences_is_changed():
    run_ranks(with_a_plan_of_its_own, 2)


class Undefined(Normed):
    """Some of its values are undefined in one process as well."""

    def forward(self, x):
        hidden = self.down_proj(self.up_proj(x).relu())
        return x + torch.where(torch.arange(WIDTH) == 3, torch.nan, hidden)


def undefined():
    calm_down()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*not finite")
        fit_words(lambda: Words(Undefined), WORDS, tp=2)


def test_what_is_undefined_in_one_process_too_is_equal():
    run_ranks(undefined, 2)
