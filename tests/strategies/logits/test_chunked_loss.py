"""linear_cross_entropy has the value and gradients of F.cross_entropy of the logits, and says what it cannot do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import raises
from torch.utils.checkpoint import checkpoint

from echelon import DataError, ModuleError, linear_cross_entropy
from echelon.strategies.logits import chunked_loss

FEATURES, CLASSES, SHAPE = 16, 37, (3, 7)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Cut the tokens of these tests into several chunks."""
    monkeypatch.setattr(chunked_loss, "_MIN_ELEMENTS", 64)


def make(*, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(*SHAPE, FEATURES, dtype=dtype, requires_grad=True)
    labels = torch.randint(CLASSES, SHAPE)
    labels[0, :4] = -100
    return hidden, torch.nn.Linear(FEATURES, CLASSES, bias=bias, dtype=dtype), labels


def plain(hidden, head, labels, *, scale=1.0, softcap=None, shift=False, **options):
    logits = head(hidden) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", **options)


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"shift": True}, {"scale": 0.3, "softcap": 2.0}, {"label_smoothing": 0.1}, {"ignore_index": 5}],
    ids=lambda options: ",".join(options) or "plain",
)
def test_value_and_gradients_are_those_of_the_logits(options, bias):
    hidden, head, labels = make(bias=bias)
    if "ignore_index" in options:
        labels = labels.masked_fill(labels == -100, 5)
    found, expected = linear_cross_entropy(hidden, head, labels, **options), plain(hidden, head, labels, **options)
    counted = labels[:, 1:] if "shift" in options else labels
    assert found.count == (counted != options.get("ignore_index", -100)).sum()
    torch.testing.assert_close(found.total, expected, rtol=0, atol=1e-12)
    both = gradients(found.total * 3, hidden, head), gradients(expected * 3, hidden, head)
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)


def test_a_head_may_be_a_weight():
    hidden, head, labels = make()
    found = linear_cross_entropy(hidden, head.weight, labels, bias=head.bias)
    both = gradients(found.total, hidden, head), gradients(plain(hidden, head, labels), hidden, head)
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)


def test_what_is_frozen_gets_no_gradient():
    hidden, head, labels = make()
    head.requires_grad_(False)
    linear_cross_entropy(hidden, head, labels).total.backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    expected = torch.autograd.grad(plain(hidden, head, labels), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=1e-12)
    head.weight.requires_grad_(True)
    linear_cross_entropy(hidden.detach(), head, labels).total.backward()
    assert head.weight.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, head, labels).total.requires_grad


def test_labels_that_are_all_ignored_and_no_tokens_at_all_give_zero():
    hidden, head, labels = make()
    for own, targets in ((hidden, torch.full_like(labels, -100)), (hidden[:0], labels[:0])):
        loss = linear_cross_entropy(own, head, targets)
        assert (float(loss.total.detach()), int(loss.count)) == (0.0, 0)
        assert not any(one.any() for one in gradients(loss.total, hidden, head))


def test_a_graph_that_is_kept_is_differentiated_again():
    hidden, head, labels = make()
    loss = linear_cross_entropy(hidden, head, labels).total
    first = torch.autograd.grad(2 * loss, [hidden, head.weight], retain_graph=True)
    second = torch.autograd.grad(5 * loss, [hidden, head.weight])
    torch.testing.assert_close([one / 2 for one in first], [one / 5 for one in second], rtol=0, atol=1e-12)


def test_it_may_be_recomputed():
    hidden, head, labels = make()
    loss = checkpoint(lambda own: linear_cross_entropy(own.tanh(), head, labels).total, hidden, use_reentrant=False)
    both = gradients(loss, hidden, head), gradients(plain(hidden.tanh(), head, labels), hidden, head)
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_near_to_float32_as_with_logits(dtype):
    hidden, head, labels = make(dtype=torch.float32)
    exact = gradients(plain(hidden, head, labels), hidden, head)
    with torch.autocast("cpu", dtype):
        found = linear_cross_entropy(hidden, head, labels).total
        expected = plain(hidden, head, labels)
    assert found.dtype == torch.float32
    errors = [
        max(
            float((own - one).abs().max()) for own, one in zip(gradients(1024 * loss, hidden, head), exact, strict=True)
        )
        for loss in (found / 1024, expected / 1024)
    ]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_low_precision_has_sums_in_float32(dtype):
    hidden, head, labels = make(dtype=dtype)
    wide = [one.detach().double().requires_grad_() for one in (hidden, head.weight, head.bias)]
    exact = plain(wide[0], lambda own: F.linear(own, *wide[1:]), labels)
    found = linear_cross_entropy(hidden, head, labels).total
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0)
    pairs = zip(gradients(found, hidden, head), torch.autograd.grad(exact, wide), strict=True)
    assert all((own - one).norm() < 2e-2 * one.norm() for own, one in pairs)


def test_what_cannot_be_is_said():
    hidden, head, labels = make()
    with raises(DataError, "from 0 to 36", "got 37", "tokenizer"):
        linear_cross_entropy(hidden, head, labels.masked_fill(labels == -100, CLASSES))
    with raises(DataError, "from 0 to 36", "got -1"):
        linear_cross_entropy(hidden, head, labels.masked_fill(labels == -100, -1))
    with raises(ModuleError, "(3, 7)", "(3, 6)", "one label"):
        linear_cross_entropy(hidden, head, labels[:, 1:])
    with raises(ModuleError, "(3, 7)", "float64"):
        linear_cross_entropy(hidden, head, labels.double())
    with raises(ModuleError, "softcap", "above 0", "-1"):
        linear_cross_entropy(hidden, head, labels, softcap=-1.0)
    with raises(ModuleError, "torch.nn.Linear", "Sequential"):
        linear_cross_entropy(hidden, torch.nn.Sequential(head), labels)
    with raises(ModuleError, "float64", "float32", "bf16-mixed"):
        linear_cross_entropy(hidden.float(), head, labels)
    with raises(ModuleError, "the 16 features that the head takes", "(3, 7, 37)", "not logits"):
        linear_cross_entropy(head(hidden), head, labels)
    with raises(ModuleError, "bias", "Linear"):
        linear_cross_entropy(hidden, head, labels, bias=head.bias)
    loss = linear_cross_entropy(hidden, head, labels).total
    with raises(ModuleError, "create_graph=True", "F.cross_entropy(head(hidden), labels)"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_hooks_of_the_head_run_once():
    hidden, head, labels = make()
    calls = []
    head.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0].shape, output.ndim)))
    linear_cross_entropy(hidden, head, labels)
    assert calls == [(hidden.shape, 0)]
    head(hidden)
    assert calls[1:] == [(hidden.shape, 3)]


@pytest.mark.parametrize("change", [lambda output: output / 2, lambda output: output.div_(2)])
def test_a_hook_that_changes_logits_is_named(change):
    hidden, head, labels = make()
    head.register_forward_hook(lambda module, inputs, output: change(output))
    with raises(ModuleError, "Linear", "hook"):
        linear_cross_entropy(hidden, head, labels)


def test_a_weight_that_is_computed_gets_its_gradients():
    hidden, head, labels = make()
    torch.nn.utils.parametrizations.weight_norm(head)
    loss = linear_cross_entropy(hidden, head, labels).total
    both = gradients(loss, hidden, head), gradients(plain(hidden, head, labels), hidden, head)
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)


MEASURE = """
import sys, torch, torch.nn.functional as F, echelon
torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(2048, 96, requires_grad=True)
head = torch.nn.Linear(96, 49152, bias=False)
labels = torch.randint(49152, (2048,))
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
head(hidden[:8]).sum().backward()  # libraries are loaded
hidden.grad = head.weight.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = peak()
if sys.argv[1] == "plain":
    F.cross_entropy(head(hidden), labels).backward()
else:
    echelon.linear_cross_entropy(hidden, head, labels).mean.backward()
print(peak() - before)
"""


@pytest.mark.only_in_sweep  # a measurement
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak of memory")
def test_the_peak_of_memory_is_a_fifth_of_that_with_logits():
    def measured(kind):
        command = [sys.executable, "-c", MEASURE, kind]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)

    assert measured("echelon") <= 0.2 * measured("plain")
