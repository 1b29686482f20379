"""Losses without logits on ranks: what is gathered, odd vocabularies, adapters, and what surrounds a step."""

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from as_rank import calm_down
from torch.utils._python_dispatch import TorchDispatchMode

import echelon
from echelon import FSDPStrategy, ParallelStrategy
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("transformers")
from families import Finetuning, build, train, train_by_hand

CLASSES = 27
"""So many that neither 2 ranks nor 4 share them evenly, and that the head is large beside a block."""
SIZES = {"vocab_size": 207, "intermediate_size": 16}


class Gathers(TorchDispatchMode):
    """Counts the elements that are gathered from other ranks, by call."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func.__name__ or "all_gather" in func.__name__:
            self.numbers.append(args[0].numel() if isinstance(args[0], torch.Tensor) else 0)
        return func(*args, **(kwargs or {}))


class Deferred(Finetuning):
    """Builds its model on the ranks."""

    def __init__(self, family, **changes):
        super().__init__(family, **changes)
        self.settings, self.lm = (family, changes), None

    def configure_model(self):
        if self.lm is None:
            self.lm = build(self.settings[0], seed=None, **self.settings[1])


class Plain(Finetuning):
    def training_step(self, batch):
        output = self.lm(input_ids=batch[0])
        return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())


class DeferredPlain(Plain, Deferred):
    """Builds its model on the ranks, and computes logits."""


class Adapted(Finetuning):
    """Trains adapters below a head that is frozen."""

    def __init__(self, family):
        super().__init__(family)
        from peft import LoraConfig, get_peft_model

        # peft 0.21 asks transformers 5.23 by a name that it will drop
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
        torch.manual_seed(2)
        self.lm = get_peft_model(self.lm, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"))


class OnHidden(Finetuning):
    """Calls the body and the head by itself."""

    def training_step(self, batch):
        hidden = self.lm.model(input_ids=batch[0]).last_hidden_state
        return echelon.linear_cross_entropy(hidden, self.lm.lm_head, batch[1])


def gathers_of(kind, strategy):
    """Return what is gathered in the second of two steps."""
    module = kind("qwen3", **SIZES)
    with Gathers() as gathers:
        module.on_train_batch_start = lambda batch, batch_idx: gathers.numbers.clear()
        train("qwen3", module=module, batch_size=2, strategy=strategy)
    return sorted(gathers.numbers)


def run(_=None):
    calm_down()
    odd = {"vocab_size": CLASSES}
    found = {
        "gathers": {
            name: [gathers_of(kind, make()) for kind in (Finetuning, Plain)]
            for name, make in (("fsdp", FSDPStrategy), ("tp", lambda: ParallelStrategy(tp=2)))
        },
        "odd": train("qwen3", module=Finetuning("qwen3", **odd), batch_size=2, strategy=ParallelStrategy(tp=2)),
        "odd, softcapped": train(
            "gemma3", module=Finetuning("gemma3", **odd), batch_size=2, strategy=ParallelStrategy(tp=2)
        ),
        "recomputed": train("llama", batch_size=2, strategy="fsdp", activation_checkpointing="full"),
    }
    found["odd, without a plan of its own"] = train(
        "gpt2",
        module=Finetuning("gpt2", **odd),
        batch_size=2,
        strategy=ParallelStrategy(tp=2, loss_parallel=True),
    )
    for name, kind in (("deferred", Deferred), ("deferred, plain", DeferredPlain)):
        echelon.seed_everything(1, verbose=False)
        found[name] = train("llama", module=kind("llama"), batch_size=2, strategy=FSDPStrategy(deferred_init=True))
    for name, make in (("fsdp", FSDPStrategy), ("tp", lambda: ParallelStrategy(tp=2))):
        found[f"on hidden states, {name}"] = train("llama", module=OnHidden("llama"), batch_size=2, strategy=make())
    for name, make in (("fsdp", FSDPStrategy), ("pp", lambda: ParallelStrategy(pp=2))):
        found[f"adapters, {name}"] = train("qwen3", module=Adapted("qwen3"), batch_size=2, strategy=make())
    return found


def test_steps_and_gathers():
    found = run_ranks(run, 2, None, timeout=500)[0]
    gathers = found.pop("gathers")
    own, plain = gathers["fsdp"]
    head = [number for number in own if number >= 207 * 16]
    assert head == [208 * 16] * 2  # the table of the embedding, and the head: once each
    assert own == plain
    own, plain = gathers["tp"]
    assert set(Counter(plain) - Counter(own)) == {2 * 8 * 208}  # the logits of a micro-batch
    assert not Counter(own) - Counter(plain)
    adapted = train("qwen3", module=Adapted("qwen3"))
    expected = {
        "odd": train_by_hand("qwen3", vocab_size=CLASSES),
        "odd, without a plan of its own": train_by_hand("gpt2", vocab_size=CLASSES),
        "odd, softcapped": train_by_hand("gemma3", vocab_size=CLASSES),
        "deferred": found.pop("deferred, plain"),
        "recomputed": train_by_hand("llama"),
        **dict.fromkeys(("on hidden states, fsdp", "on hidden states, tp"), train_by_hand("llama")),
        **dict.fromkeys(("adapters, fsdp", "adapters, pp"), adapted),
    }
    assert found.keys() == expected.keys()
    for name, state in found.items():
        got = {key: value for key, value in state.items() if key in expected[name]}
        assert len(got) >= len(expected[name]) - 1, name
        for key, value in got.items():
            torch.testing.assert_close(
                value, expected[name][key], rtol=0, atol=1e-12, msg=lambda text, at=(name, key): f"{at} {text}"
            )
