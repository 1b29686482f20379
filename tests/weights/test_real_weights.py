"""MiniLM and SmolLM2 train as by hand in every layout: their shapes, vocabularies and values are those that people use.

SmolLM2 has 9 heads, 3 key-value heads and 49,152 words; of its 30 layers two are trained, to be quick, and all of them
in one case. MiniLM is whole: 6 layers of 12 heads, 22.7 million weights.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from as_rank import calm_down
from sweep import IS_SWEEP

import echelon
from echelon import FSDPStrategy, ParallelStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load_weights

sys.path.append(str(Path(__file__).parent))
import real_models
from real_models import LR, SAMPLES, Tuned, build, by_hand, fit, furthest, state_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23

LAYOUTS = {
    "ddp": (2, lambda: "ddp", {}),
    "zero": (2, lambda: "zero", {}),
    "fsdp": (2, lambda: "fsdp", {}),
    "pp 2": (2, lambda: ParallelStrategy(pp=2), {}),
    "tp 3": (3, lambda: ParallelStrategy(tp=3), {}),
    "fsdp x pp": (4, lambda: ParallelStrategy(dp_shard=2, pp=2), {"batch_size": 1}),
}
BESIDE = {
    "fsdp, deferred": (2, lambda: FSDPStrategy(deferred_init=True), {}),
    "tp 3, deferred": (3, lambda: ParallelStrategy(tp=3, deferred_init=True), {}),
    "fsdp, recomputed": (2, lambda: "fsdp", {"activation_checkpointing": "full"}),
}
KINDS = ("minilm", "smollm2")
CASES = [*(("minilm", layout) for layout in (LAYOUTS if IS_SWEEP else ("zero",))), ("smollm2", "pp 2")]
"""Those that are quick; `every_layout.py` runs all of them, by hand. Under fsdp, SmolLM2 becomes a folder as well."""
CASES_BESIDE = [("smollm2", "tp 3, deferred"), ("minilm", "fsdp, recomputed")] * IS_SWEEP
ADAPTERS = [("minilm", "ddp")]
NUMBERS = sorted({(LAYOUTS | BESIDE)[layout][0] for _, layout in [*CASES, *CASES_BESIDE, *ADAPTERS]})
ROUNDING = 2e-5
"""How far float32 may take weights from those of another order of sums; they move by more than a hundred times that."""
DOCSTRINGS = [
    *(1348, 7063, 2433, 1594, 288, 260, 7132, 3691, 198, 16571, 411, 260, 340, 2920, 30, 198),
    *(4531, 13851, 327, 23234, 355, 15110, 1088, 4509, 335, 732, 817, 392, 2316, 335, 30, 198),
]
"""The docstring of `math` and the first line of that of `os`, in tokens of SmolLM2: its tokenizer takes 5 s to read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with both models, the weights to which training by hand leads, and losses of all of SmolLM2."""
    real_models.need_packages()
    folder = tmp_path_factory.mktemp("real")
    torch.set_num_threads(1)
    prepare(folder, ADAPTERS)
    return folder


def prepare(folder, adapters):
    """Write the models, and what training by hand leads to, with adapters for the kinds of these cases."""
    real_models.write_minilm(folder / "minilm")
    model = real_models.read_smollm2()
    torch.save(losses_of_adapters(model), folder / "losses.pt")
    real_models.write_smollm2(folder / "smollm2", model)
    for kind in KINDS:
        torch.save(by_hand(kind, folder / kind), folder / f"{kind}.pt")
        if kind in dict(adapters):
            torch.save(by_hand(kind, folder / kind, adapters=True), folder / f"{kind}, adapters.pt")
    if IS_SWEEP:
        torch.save(by_hand("minilm", folder / "minilm", dtype=torch.bfloat16), folder / "minilm, bf16.pt")


def losses_of_adapters(model):
    """Return the plain loss of Python's own words, and those of three steps of adapters, which are taken off again."""
    from peft import LoraConfig, get_peft_model

    tokens = torch.tensor([DOCSTRINGS])
    plain = float(model(input_ids=tokens, labels=tokens).loss.detach())
    module = WithoutLogits(get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train())
    real_models.double_trainer(precision="32-true", max_epochs=3).fit(module, torch.utils.data.DataLoader(tokens))
    module.lm.unload()
    return [plain, *module.losses]


def expected(folder, name):
    return torch.load(folder / f"{name}.pt", mmap=True)


def distance(folder, kind, strategy, *, adapters=False, against=None, **settings):
    """Train; return how far the weights are from those by hand."""
    trainer = fit(Tuned(kind, folder / kind, adapters=adapters), strategy, **settings)
    found = state_of(trainer)
    return furthest(found, expected(folder, against or (f"{kind}, adapters" if adapters else kind)))


def resumed(folder):
    """Return how far a resumed run under fsdp is from one that was never stopped, with AdamW, and its first step."""

    def module():
        return Tuned("minilm", folder / "minilm", optimizer=torch.optim.AdamW, lr=1e-4)

    saves = echelon.ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = state_of(fit(module(), "fsdp", callbacks=saves, enable_checkpointing=True))
    checkpoint = folder / "steps" / "step=1.ckpt"
    last = state_of(fit(module(), "fsdp", ckpt_path=checkpoint))
    first = {name.removeprefix("lm."): value for name, value in load_weights(checkpoint).items()}
    return furthest(last, whole), furthest(first, whole) if whole else math.nan


def exported(folder):
    """Train SmolLM2 under fsdp and write a folder; return its path, and how far its weights are from those by hand."""
    saves = echelon.HuggingFaceCheckpoint(folder / "exported")
    settings = {"callbacks": saves, "activation_checkpointing": "full"}
    trainer = fit(Tuned("smollm2", folder / "smollm2"), FSDPStrategy(deferred_init=True), **settings)
    return saves.last_path, furthest(state_of(trainer), expected(folder, "smollm2"))


def train_all(folder, num_ranks):
    calm_down()
    torch.set_num_threads(1)
    found = {}
    for kind, layout in [*CASES, *CASES_BESIDE]:
        ranks, make, settings = (LAYOUTS | BESIDE)[layout]
        if ranks == num_ranks:
            found[kind, layout] = distance(folder, kind, make(), **settings)
    if num_ranks == 2:
        for kind, layout in ADAPTERS:
            found[kind, f"{layout}, adapters"] = distance(folder, kind, LAYOUTS[layout][1](), adapters=True)
        if IS_SWEEP:
            found["bf16"] = distance(folder, "minilm", "fsdp", against="minilm, bf16", precision="bf16-mixed")
            found["resumed"] = resumed(folder)
        found["exported"] = exported(folder)
    return found


@pytest.fixture(scope="module")
def trained(folder):
    found = {}
    for num_ranks in NUMBERS:
        found |= run_ranks(train_all, num_ranks, folder, num_ranks, timeout=600)[0]
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "layout"), [*CASES, *CASES_BESIDE])
def test_two_steps_are_those_of_a_loop_by_hand(kind, layout, trained):
    assert trained[kind, layout] <= ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_by_hand_change_much_more_than_rounding(kind, folder):
    start = build(kind, folder / kind, loads=None).state_dict()
    assert furthest(start, expected(folder, kind)) > 100 * ROUNDING


@pytest.mark.parametrize(("kind", "layout"), ADAPTERS)
def test_adapters_of_real_weights_train_as_by_hand(kind, layout, trained):
    assert trained[kind, f"{layout}, adapters"] <= ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_takes_the_steps_of_a_loop_to_the_bit(kind, folder):
    """Without accumulation: halves of a step are weighed by their samples, which rounds otherwise."""
    trainer = fit(Tuned(kind, folder / kind), global_batch_size=2, max_steps=2)
    model = build(kind, folder / kind, loads=None)
    for parameter in model.parameters():  # transformers maps the file; some CPUs add up by where numbers lie in memory
        parameter.data = parameter.data.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for start in (0, 2):
        optimizer.zero_grad()
        real_models.loss_of(kind, model, [part[start : start + 2] for part in SAMPLES[kind]()]).backward()
        optimizer.step()
    assert furthest(state_of(trainer), model.state_dict()) == 0.0


@pytest.mark.only_in_sweep
def test_bf16_on_shards_is_about_as_far_from_bf16_by_hand_as_bf16_is_from_float32(folder, trained):
    own = furthest(expected(folder, "minilm, bf16"), expected(folder, "minilm"))
    assert 0 < trained["bf16"] <= 2 * own


@pytest.mark.only_in_sweep
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(trained):
    from_whole, moved = trained["resumed"]
    assert from_whole == 0.0
    assert moved > 0


def test_a_folder_that_was_trained_on_shards_has_the_logits_of_the_trained_model(folder, trained):
    path, apart = trained["exported"]
    assert apart <= ROUNDING
    written = build("smollm2", path, loads=None).eval()
    loaded = build("smollm2", path).eval()
    by_hand = build("smollm2", folder / "smollm2", loads=None).eval()
    by_hand.load_state_dict(expected(folder, "smollm2"))
    [tokens] = SAMPLES["smollm2"]()
    with torch.no_grad():
        logits, again, wanted = (model(input_ids=tokens[:2]).logits for model in (written, loaded, by_hand))
    assert torch.equal(logits, again)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)


def test_the_whole_smollm2_loses_less_with_each_step_of_adapters_without_logits(folder):
    plain, *losses = expected(folder, "losses")
    assert 2 < plain < 6  # a guess is worth ln 49,152 = 10.8
    assert losses[0] == pytest.approx(plain, rel=1e-4)
    assert losses == sorted(losses, reverse=True)


class WithoutLogits(echelon.TrainModule):
    """Adapters of a model whose logits are never there as a whole."""

    def __init__(self, model):
        super().__init__()
        self.lm, self.losses = model, []

    def training_step(self, batch):
        loss = echelon.language_model_loss(self.lm, input_ids=batch, labels=batch)
        self.losses.append(float(loss.mean.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, fused=True)
