"""language_model_loss runs models as they are, and names what it cannot do without their logits."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import raises
from torch import nn

import echelon
from echelon import ModuleError, language_model_loss

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("transformers")
from families import build, samples

INPUTS, TARGETS = samples()
BATCH = {"input_ids": INPUTS, "labels": INPUTS.masked_fill(TARGETS == -100, -100)}


class Own(nn.Module):
    """A language model that does something with its logits."""

    def __init__(self, does):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.does = nn.Embedding(26, 16), nn.Linear(16, 26), does

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels):
        return {"loss": self.does(self.head(self.table(input_ids)), labels)}


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def halved(logits):
    same = logits
    logits *= 0.5
    return same


def test_what_a_model_adds_to_its_loss_is_kept():
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=26, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    found, expected = language_model_loss(model, **BATCH), model(**BATCH)
    assert float(expected.aux_loss.detach()) > 0.5
    torch.testing.assert_close(found.mean, expected.loss)
    without = language_model_loss(model, **{**BATCH, "labels": torch.full_like(INPUTS, -100)})
    assert (float(without.total.detach()), int(without.count)) == (0.0, 0)
    without.total.backward()
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    with torch.inference_mode():
        torch.testing.assert_close(language_model_loss(model, **BATCH).mean, found.mean)


@pytest.mark.parametrize(
    "does",
    [
        lambda logits, labels: cross_entropy(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()),
        lambda logits, labels: cross_entropy(logits[:, 2:], labels[:, 2:]),
        lambda logits, labels: F.cross_entropy(logits[labels != 3].double(), labels[labels != 3]),
        lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
        lambda logits, labels: F.cross_entropy(logits.permute(0, 2, 1), labels, label_smoothing=0.2),
        lambda logits, labels: nn.CrossEntropyLoss()(logits.view(-1, 26), labels.view(-1)) / 7,
        lambda logits, labels: cross_entropy(logits, labels).add_(1.0).mul_(2.0),
        lambda logits, labels: cross_entropy(torch.tanh(logits.float() / 0.5) * 0.5, labels),
        lambda logits, labels: cross_entropy(-(2.0 * logits - torch.linspace(0, 1, 26)), labels),
        lambda logits, labels: cross_entropy(logits.mul_(3).clamp(-1, 1).to(torch.float64), labels),
        lambda logits, labels: cross_entropy(halved(logits), labels),
        lambda logits, labels: cross_entropy(logits, labels, weight=torch.linspace(1, 2, 26)),
        lambda logits, labels: cross_entropy(logits[:, None].squeeze(1), labels) * (logits.size(-1) / len(logits)),
    ],
)
def test_what_it_does_with_its_logits_is_done_to_the_loss(does):
    model = Own(does)
    batch = {**BATCH, "labels": BATCH["labels"].masked_fill(INPUTS % 7 == 0, -100)}
    found = language_model_loss(model, **batch)
    expected = model(**batch)["loss"]
    torch.testing.assert_close(found.mean, expected, rtol=1e-5, atol=1e-6)
    both = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found.mean, expected))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()), "log_softmax"),
        (lambda logits, labels: cross_entropy(torch.cat([logits, logits]), labels), "cat"),
        (lambda logits, labels: cross_entropy(logits + logits, labels), "__add__"),
        (lambda logits, labels: cross_entropy(logits[..., :20], labels), "a selection of classes"),
        (lambda logits, labels: cross_entropy(logits * torch.ones(26, requires_grad=True), labels), "with a gradient"),
        (lambda logits, labels: cross_entropy(logits * torch.ones(9, 1), labels), "of shape (9, 1)"),
        (lambda logits, labels: cross_entropy(logits, labels, reduction="none").mean(), "reduction='none'"),
        (lambda logits, labels: cross_entropy(logits, labels, reduction="sum"), "reduction='sum'"),
        (lambda logits, labels: F.cross_entropy(logits, logits.detach()), "detach"),
        (lambda logits, labels: cross_entropy(logits.mT, labels), "mT"),
        (lambda logits, labels: logits.sum(), "sum"),
        (lambda logits, labels: cross_entropy(1 - logits, labels), "rsub"),
        (lambda logits, labels: cross_entropy(logits**2, labels), "pow"),
        (lambda logits, labels: cross_entropy(logits[..., None].squeeze(-1), labels), "after the classes"),
        (lambda logits, labels: cross_entropy(logits, labels) + 0 * logits.view(-1, 26).mul_(2).size(0), "in place"),
    ],
)
def test_what_is_not_known_is_named(does, what):
    with raises(ModuleError, "Own", what, "model(**batch).loss"):
        language_model_loss(Own(does), **BATCH)


def test_an_assignment_is_named():
    def does(logits, labels):
        logits[:, :, 3] = -1e9
        return cross_entropy(logits, labels)

    with raises(ModuleError, "an assignment"):
        language_model_loss(Own(does), **BATCH)


def test_batches_and_models_that_cannot_be_are_named():
    model = build("llama")
    with raises(ModuleError, "labels", "input_ids"):
        language_model_loss(model, input_ids=INPUTS)
    with raises(ModuleError, "num_items_in_batch", "left out"):
        language_model_loss(model, **BATCH, num_items_in_batch=3)
    with raises(ModuleError, "Linear", "get_output_embeddings", "linear_cross_entropy"):
        language_model_loss(nn.Linear(2, 2), **BATCH)
    with raises(ModuleError, "one cross-entropy", "got 2"):
        language_model_loss(
            Own(lambda logits, labels: cross_entropy(logits, labels) * 2 + cross_entropy(logits, labels)), **BATCH
        )
    with raises(ModuleError, "got 0"):
        language_model_loss(Own(lambda logits, labels: labels.float().mean()), **BATCH)
    with raises(ModuleError, "return its loss", "float"):
        language_model_loss(Own(lambda logits, labels: float(cross_entropy(logits, labels).detach())), **BATCH)
    assert model(**BATCH).logits.shape == (*INPUTS.shape, 26)  # nothing is left of the calls


def test_adapters_train_below_the_head_and_are_refused_on_it():
    peft = pytest.importorskip("peft")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
    for kept in ({}, {"modules_to_save": ["lm_head"]}):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **kept)
        model = peft.get_peft_model(build("qwen3"), config)
        trained = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(language_model_loss(model, **BATCH).mean, trained)
        torch.testing.assert_close(found, torch.autograd.grad(model(**BATCH).loss, trained))
    on_head = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with raises(ModuleError, "CausalLM", "__add__"):
        language_model_loss(peft.get_peft_model(build("qwen3"), on_head), **BATCH)


def test_an_engine_trains_without_logits():
    def train(loss_of):
        engine = echelon.Engine(accelerator="cpu")
        model = build("llama")
        model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(2):
            optimizer.zero_grad()
            engine.backward(loss_of(model))
            optimizer.step()
        return model.state_dict()

    found = train(lambda model: language_model_loss(model, **BATCH).mean)
    torch.testing.assert_close(found, train(lambda model: model(**BATCH).loss))


def test_a_model_that_is_compiled_as_one_runs_as_it_is_written():
    model = build("llama")
    expected = model(**BATCH).loss
    model.compile()
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM is compiled as one.*model.model.compile"):
        found = language_model_loss(model, **BATCH)
    torch.testing.assert_close(found.mean, expected)
