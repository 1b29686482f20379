"""Plans beside what others have published: the time and memory of steps on A100 and H100, without such a device.

Usage: python benchmarks/published_plans.py [--rows WORD ...]

Each row is a run of a published table. The module has its shape, on tensors without memory: transformers' Llama and
GPT-2 stand for the models that were measured. None of the constants of `echelon plan` comes from these tables;
trainer/planning/step_time.py says where they are from. tokens/s are those of one GPU; a ratio of 1.00 is a plan that
came true. Memory is published for some; of those, the rows without tokens/s ran compiled code in float8, which is not
planned: it fuses what the plan counts as kept, and saves some percent.

Tables:
  titan-24  torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB, 2.4 TB/s, 500 W; 400 Gb/s a GPU)
  titan     torchtitan, docs/performance.md (64 A100 of 80 GB)
  foundry   llm-foundry, scripts/train/benchmarking/README.md (MPT on H100 and A100 of 80 GB, 1,600 Gb/s a node)
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from echelon import ActivationCheckpointing, Trainer, TrainModule
from echelon.strategies import FSDPStrategy, ParallelStrategy, Strategy
from echelon.strategies.torch_internals.fake_tensors import make_fake_mode
from echelon.trainer.planning.layouts import RunLayout
from echelon.trainer.planning.machine import Machine
from echelon.trainer.planning.plan import PlannedLayout, Profiles, Recomputed, choose_micro_batch
from echelon.trainer.planning.profiling import ProfilingStrategy, build_without_memory, take_profile
from echelon.trainer.planning.step_time import speed_of

LLAMA: Final = {
    "Llama 3 8B": (4096, 14336, 32, 32, 8, 128256),
    "Llama 3 70B": (8192, 28672, 80, 64, 8, 128256),
    "Llama 3 405B": (16384, 53248, 126, 128, 8, 128256),
    "Llama 2 13B": (5120, 13824, 40, 40, 40, 32000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32000),
}
"""Width, width inside, layers, heads, heads of keys and values, and tokens of the vocabulary."""
MPT: Final = {
    "MPT 1B": (2048, 24, 16),
    "MPT 3B": (2560, 32, 20),
    "MPT 7B": (4096, 32, 32),
    "MPT 13B": (5120, 40, 40),
    "MPT 30B": (7168, 48, 56),
    "MPT 70B": (8192, 80, 64),
}
"""Width, layers and heads; the vocabulary has 50,368 tokens."""


@dataclass(frozen=True)
class Row:
    """A run of a published table."""

    table: str
    model: str
    gpu: str
    devices: int
    length: int
    batch: int
    """Of a micro-batch, on each GPU."""
    accumulate: int
    recomputes: str
    """The setting of activation checkpointing; "" for none, "other" for every other block."""
    tokens: float | None
    """Published, a second on each GPU; None where it is that of compiled code, whose speed is not planned."""
    memory: float | None = None
    """Published, in GiB."""
    degrees: tuple[tuple[str, int], ...] = ()
    """Of parallelism, beside fsdp."""


ROWS: Final = (
    Row("titan-24", "Llama 3 8B", "H100", 8, 8192, 2, 1, "selective", 5762, 82.4),
    Row("titan-24", "Llama 3 8B", "H100", 128, 8192, 2, 1, "selective", 5605, 67.0),
    *(Row("titan-24", "Llama 3 8B", "H100", 8, 8192, 2, 1, "selective", None, memory) for memory in (77.0, 76.8)),
    *(Row("titan-24", "Llama 3 8B", "H100", 128, 8192, 2, 1, "selective", None, memory) for memory in (62.0, 61.8)),
    Row("titan-24", "Llama 3 8B", "H100", 8, 32768, 1, 1, "full", None, 83.9),
    Row("titan-24", "Llama 3 8B", "H100", 8, 65536, 1, 1, "full", None, 84.2, (("cp", 2),)),
    Row("titan-24", "Llama 3 8B", "H100", 8, 131072, 1, 1, "full", None, 84.0, (("cp", 4),)),
    Row("titan-24", "Llama 3 8B", "H100", 8, 262144, 1, 1, "full", None, 84.5, (("cp", 8),)),
    Row("titan-24", "Llama 3 70B", "H100", 256, 8192, 16, 1, "full", None, 71.9, (("tp", 8),)),
    Row("titan", "Llama 3 8B", "A100", 64, 8192, 1, 1, "other", 2904),
    Row("titan", "Llama 3 8B", "A100", 64, 8192, 1, 1, "selective", 2973),
    Row("titan", "Llama 3 70B", "A100", 64, 8192, 1, 1, "full", 331),
    Row("titan", "Llama 2 13B", "A100", 64, 4096, 2, 1, "", 2162),
    Row("titan", "Llama 2 13B", "A100", 64, 4096, 2, 1, "other", 1914),
    Row("titan", "Llama 2 13B", "A100", 64, 4096, 2, 1, "selective", 1904),
    Row("titan", "Llama 2 70B", "A100", 64, 4096, 1, 1, "selective", 355),
    Row("titan", "Llama 2 70B", "A100", 64, 4096, 2, 1, "full", 353),
    Row("foundry", "MPT 1B", "H100", 8, 2048, 14, 1, "", 45455),
    Row("foundry", "MPT 3B", "H100", 8, 8192, 3, 6, "", 16578),
    Row("foundry", "MPT 7B", "H100", 8, 2048, 6, 1, "", 10643),
    Row("foundry", "MPT 7B", "H100", 8, 8192, 8, 2, "full", 6935),
    Row("foundry", "MPT 13B", "H100", 8, 2048, 2, 1, "", 4792),
    Row("foundry", "MPT 13B", "H100", 64, 2048, 2, 1, "", 4800),
    Row("foundry", "MPT 30B", "H100", 32, 2048, 14, 3, "full", 2308),
    Row("foundry", "MPT 1B", "A100", 8, 2048, 14, 4, "", 20513),
    Row("foundry", "MPT 3B", "A100", 8, 8192, 3, 6, "", 7695),
    Row("foundry", "MPT 7B", "A100", 8, 2048, 6, 2, "", 4641),
    Row("foundry", "MPT 7B", "A100", 8, 32768, 2, 2, "full", 1672),
    Row("foundry", "MPT 13B", "A100", 8, 2048, 2, 3, "", 2262),
    Row("foundry", "MPT 30B", "A100", 8, 2048, 3, 21, "full", 916),
)


class Model(TrainModule):
    """A language model of transformers that returns its own loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

        if name in LLAMA:
            width, inside, layers, heads, key_heads, vocabulary = LLAMA[name]
            config: Any = LlamaConfig(
                hidden_size=width, intermediate_size=inside, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=key_heads, vocab_size=vocabulary, max_position_embeddings=1 << 17,
                tie_word_embeddings=False,
            )  # fmt: skip
        else:
            width, layers, heads = MPT[name]
            config = GPT2Config(
                n_embd=width, n_layer=layers, n_head=heads, vocab_size=50368, n_positions=1 << 16,
                activation_function="gelu_pytorch_tanh",  # one operator, as MPT's
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
        config.use_cache = False
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def plan_of(row: Row) -> PlannedLayout:
    """Return the plan of the run of a row."""
    mode = make_fake_mode()
    with build_without_memory(mode):
        module = Model(row.model)
    settings: dict[str, Any] = {
        "": None,
        "full": ActivationCheckpointing(),
        # torchtitan's keeps every second matrix product
        "selective": ActivationCheckpointing(mode="selective", every_product=2),
        "other": ActivationCheckpointing(modules=lambda name, _: name.rpartition(".")[2] in map(str, range(0, 200, 2))),
    }
    tokens = torch.utils.data.TensorDataset(torch.zeros(row.batch, row.length, dtype=torch.long))
    data = torch.utils.data.DataLoader(tokens, batch_size=row.batch)

    def fit(strategy: ProfilingStrategy, callback: Any) -> None:
        trainer = Trainer(
            accelerator="cpu", devices=1, barebones=True, max_steps=1, precision="bf16-mixed", strategy=strategy,
            callbacks=[callback], activation_checkpointing=settings[row.recomputes],
        )  # fmt: skip
        trainer.fit(module, data)

    profile = take_profile(fit, module, ProfilingStrategy(mode=mode))
    recomputes: Recomputed = "full" if row.recomputes else ""
    profiles = Profiles(whole={recomputes: profile}, halved={})
    # gradients are summed after each micro-batch, as those runs did it
    make: Callable[[], Strategy] = partial(FSDPStrategy, sync_each_micro_batch=row.accumulate > 1)
    degrees: dict[str, Any] = dict(row.degrees)
    if degrees:
        is_cut = "tp" in degrees  # with sequences and vocabulary, as torchtitan does by default
        make = partial(ParallelStrategy, sequence_parallel=is_cut, loss_parallel=is_cut, **degrees)
    readers = row.devices // math.prod(degrees.values())
    layout = RunLayout("fsdp", make, "fsdp", readers)
    number = readers * row.batch * row.accumulate
    return choose_micro_batch(profiles, _machine(row), layout, number, recomputes=recomputes)


def _machine(row: Row) -> Machine:
    speed = speed_of(row.gpu, torch.bfloat16)
    assert speed is not None
    if row.table == "titan-24":  # "the actual peak is between SXM and NVL"; 2.4 TB/s
        speed = replace(speed, peak_flops=(989.4e12 + 835.5e12) / 2, memory_bandwidth=2.4e12)
    return Machine(
        num_devices=row.devices,
        num_nodes=max(1, row.devices // 8),
        memory=(96 if row.table == "titan-24" else 80) * 1e9,
        speed=speed,
        node_bandwidth={"titan-24": 50e9, "titan": 25e9, "foundry": 50e9 if row.gpu == "H100" else 25e9}[row.table],
    )


def main(words: list[str]) -> None:
    """Print each row with its plan, and how many of them are near."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    ratios, sizes = [], []
    head = f"{'table':9}{'model':13}{'GPUs':>10}{'length':>8}{'batch':>8} {'recomputes':11}"
    print(
        head
        + f"{'tokens/s':>10}{'plan':>8}{'ratio':>7}{'GiB':>7}{'plan':>7}   computes, updates, exchanges, uncovered (s)"
    )
    for row in ROWS:
        name = f"{row.table} {row.model} {row.gpu} {row.recomputes}"
        if words and not all(word in name for word in words):
            continue
        began = time.perf_counter()
        planned = plan_of(row)
        assert planned.time is not None
        parts, size = planned.time, planned.estimate.total / 2**30
        tokens = row.batch * row.accumulate * row.length / parts.total / math.prod(degree for _, degree in row.degrees)
        if row.tokens is not None:
            ratios.append(tokens / row.tokens)
        if row.memory is not None:
            sizes.append(size / row.memory)
        compared = f"{row.tokens:>10,.0f}{tokens:>8,.0f}{ratios[-1]:>7.2f}" if row.tokens is not None else " " * 25
        print(
            f"{row.table:9}{row.model:13}{row.devices:>5} {row.gpu}{row.length:>8}{row.batch:>4} x {row.accumulate:<2} "
            f"{row.recomputes:10}{compared}"
            f"{'' if row.memory is None else format(row.memory, '.1f'):>7}{size:>7.1f}   "
            f"{parts.computing:.3f} {parts.updating:.3f} {parts.exchanging:.3f} {parts.uncovered:.3f}"
            f"   ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    near = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
    if ratios:
        print(f"{near} of {len(ratios)} within 25%, median {statistics.median(ratios):.2f}")
    close = sum(0.85 <= ratio <= 1.15 for ratio in sizes)
    if sizes:
        print(f"{close} of {len(sizes)} within 15% of the memory, median {statistics.median(sizes):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[], metavar="WORD", help="only rows that have all these words")
    main(parser.parse_args().rows)
