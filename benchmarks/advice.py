"""The advice on the time of steps, and what following it gives: a BERT of MiniLM's size with the default AdamW.

Usage: python benchmarks/advice.py [--steps N] [--length N]

A Trainer trains it on one thread of a CPU, as it is and with the ``fused=True`` that it is advised; the shares
of a step that were promised and saved are printed, from medians of processor time. The target is to save 0.8 of what
was promised. It needs transformers.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from statistics import median
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.trainer.savings.advisor import MEASURED, WARM_UP, TimeAdvisor

BATCH = 16


class Sentences(echelon.TrainModule):
    """MiniLM's shape, with random weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self.net = BertModel(config)
        self.head = torch.nn.Linear(384, 1)
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.net(input_ids=batch[0]).last_hidden_state[:, 0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 5e-5, **self.options)


class Times(echelon.Callback):
    """Notes the processor time at the end of each step, in which other programs of the machine do not count."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.ends.append(time.process_time())

    def step(self) -> float:
        """Return the median of the steps after the warm-up, in seconds."""
        ends = self.ends[WARM_UP:]
        return median(after - before for before, after in itertools.pairwise(ends))


def train(steps: int, length: int, **options: bool) -> tuple[float, TimeAdvisor]:
    """Return the seconds of a step, and what was found about it."""
    times, advisor = Times(), TimeAdvisor()
    trainer = echelon.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[times, advisor],
    )  # fmt: skip
    rows = TensorDataset(torch.randint(30000, (BATCH * steps, length)))
    trainer.fit(Sentences(**options), DataLoader(rows, BATCH))
    return times.step(), advisor


def main() -> None:
    """Print what was advised, what was promised, and what following it saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=WARM_UP + MEASURED + 5)
    parser.add_argument("--length", type=int, default=16, help="tokens of a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, advisor = train(options.steps, options.length)
    advice = next((saving for saving in advisor.savings if saving.kind == "optimizer"), None)
    print(advisor.savings[0].text if advisor.savings else "nothing was advised")
    if advice is None:
        return
    after, _ = train(options.steps, options.length, fused=True)
    saved = 1 - after / before
    print(f"{1000 * before:.0f} ms a step, {1000 * after:.0f} with fused=True")
    print(f"promised {advice.share:.2f} of a step, saved {saved:.2f}: {saved / advice.share:.2f} of it")


if __name__ == "__main__":
    main()
