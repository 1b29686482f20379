"""LoRA on a small Llama by hand, by Echelon and by the Trainer of transformers: time of a step, and peak memory.

Run ``python benchmarks/finetune.py``; it needs transformers, peft and accelerate. All train the same model on the same
batches with AdamW, in float32 on one thread, without logging and checkpoints. For time, they take turns of a few steps
in one process (turns.py), and a ratio is relative to the hand-written loop in the same round. For memory, each trains
in a process of its own: its peak beside what it held when the model was built. The target for Echelon is a ratio to the
Trainer of transformers of at most 1 in both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Size, Turns, compete, summarise, times_of

import echelon

BATCH, LENGTH, VOCABULARY = 4, 32, 256


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, as many as the steps need."""

    def __init__(self, number: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build(width: int) -> Any:
    """Return the model with its adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def by_hand(model: Any, steps: int) -> None:
    """Train by a plain loop."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for batch in DataLoader(Rows(BATCH * steps), BATCH):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


class Finetuning(echelon.TrainModule):
    """The model in a module of Echelon."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


def by_echelon(model: Any, steps: int) -> None:
    """Train by Echelon's Trainer."""
    trainer = echelon.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Finetuning(model), DataLoader(Rows(BATCH * steps), BATCH))


def by_transformers(model: Any, steps: int) -> None:
    """Train by the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, report_to="none",
            lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", logging_strategy="no", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Rows(BATCH * steps)).train()


CONTENDERS: dict[str, Callable[[Any, int], None]] = {
    "plain loop": by_hand,
    "echelon": by_echelon,
    "transformers": by_transformers,
}


def in_turns(train: Callable[[Any, int], None], width: int, size: Size, turns: Turns) -> None:
    """Train, and mark each forward."""
    model = build(width)
    model.register_forward_pre_hook(lambda *_: turns.mark())
    train(model, size.num_steps)


def peak_of(name: str, width: int, steps: int) -> int:
    """Return the peak memory of a contender in this process, beside what it held once it had made a first step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    CONTENDERS[name](build(8), 1)  # what it imports does not count
    model, status = build(width), Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    held = {line.split(":")[0]: line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")}
    CONTENDERS[name](model, steps)
    peak = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * (int(peak) - int(held["VmRSS"]))


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("steps", 10), ("warmup", 2), ("rounds", 10), ("contests", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory-width", type=int, default=1024, help="that of the model of which peaks are taken")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = Size(options.contests, options.rounds, options.steps, options.warmup)
    runs = {name: partial(in_turns, train, options.width, size) for name, train in CONTENDERS.items()}
    rows = summarise(times_of(compete(runs, size)), "plain loop", by_cpu=True)
    for name, row in rows.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row["peak_bytes"] = process.submit(peak_of, name, options.memory_width, 3).result()
    theirs = rows["transformers"]
    found = {
        "time": theirs["speed"] / rows["echelon"]["speed"],
        "memory": rows["echelon"]["peak_bytes"] / max(1, theirs["peak_bytes"]),
    }
    if options.json:
        print(json.dumps({"rows": rows, "ratio": found}))
        return
    print(f"{'':14}{'us/step':>10}{'ratio':>8}{'+-':>7}{'peak MB':>10}")
    for name, row in rows.items():
        time, error, peak = row["us_per_step"], row["speed_error"], row["peak_bytes"] / 1e6
        print(f"{name:14}{time:10.0f}{1 / row['speed']:8.3f}{error:7.3f}{peak:10.1f}")
    print(f"Echelon to transformers: {found['time']:.3f} of the time, {found['memory']:.3f} of the memory")


if __name__ == "__main__":
    main()
