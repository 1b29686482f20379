"""Cut sequences that become longer than a window, and what a step logs and counts from parts of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import Callback, ModuleError, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")


class Attention(nn.Module):
    """Causal attention that asks for a mask only where sequences are longer than its window, as transformers does."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.out, self.window_size = nn.Linear(8, 24), nn.Linear(8, 8), window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask, places = None, torch.arange(x.shape[1])
        if x.shape[1] > self.window_size:
            mask = (places[:, None] >= places) & (places[:, None] - places < self.window_size)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return out


class Model(TrainModule):
    """A language model that logs and counts what it is told to."""

    def __init__(self, window: int, counts: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Attention(window) for _ in range(2))
        self.head = nn.Linear(8, 32)
        self.counts = counts
        self.samples, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.exact = torchmetrics.MeanMetric()
        self.correct = torchmetrics.classification.MulticlassAccuracy(32, average="micro")
        self.validated = torchmetrics.SumMetric()
        self.held = {"ids": torchmetrics.CatMetric()}
        self.ids: list[float] = []

    def sequence_dims(self, batch: Any) -> Any:
        return [1, 1, None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets, ids = batch
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        getattr(self, self.counts)(logits.detach(), targets, ids, loss.detach())
        return loss

    def metrics(self, logits: Tensor, targets: Tensor, ids: Tensor, loss: Tensor) -> None:
        self.samples.update(len(ids))
        self.correct.update(logits.flatten(0, 1), targets.flatten() // 2)
        self.mean.update(loss)
        self.held["ids"].update(ids)
        self.log_dict(
            {"samples": self.samples, "correct": self.correct, "mean": self.mean}, on_step=False, on_epoch=True
        )
        self.log("tokens", float(targets.numel()), reduce_fx="sum", on_step=False, on_epoch=True)

    def nothing(self, *_: Any) -> None:
        pass

    def whole_sequences(self, logits: Tensor, targets: Tensor, *_: Any) -> None:
        self.exact.update((logits.argmax(-1) % 2 == targets % 2).all(-1).double())
        self.log("exact", self.exact)

    def perplexity(self, logits: Tensor, targets: Tensor, ids: Tensor, loss: Tensor) -> None:
        self.log("perplexity", loss.exp())

    def number(self, logits: Tensor, targets: Tensor, ids: Tensor, loss: Tensor) -> None:
        self.log("number", float(len(ids)), reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Use no head, and count samples in a metric object to which training, checked in between, adds nothing."""
        x = self.tokens(batch[0])
        for layer in self.layers:
            x = layer(x)
        self.validated.update(len(batch[2]))
        self.log("validated", self.validated)

    def on_train_epoch_end(self) -> None:
        if self.counts == "metrics":
            self.ids = sorted(self.held["ids"].compute().tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED = {
    ("whole_sequences", (8, 8)): "the metric exact is 0.*from the parts, but",
    ("perplexity", (8, 8)): r"self.log\('perplexity', ...\) gets .* from the parts, but .* from the whole",
    ("number", (8, 8)): r"self.log\('number', ...\) with reduce_fx='sum' gets 6 from the parts, but 3",
    ("nothing", (4, 8, 16, 8)): r"windows that are shorter than the sequences of 16 tokens \(layers.0.window_size=12",
    ("nothing", (32, 8)): r"must have a column for each .*of 32 tokens \(layers.0.window_size=12",
}
"""What is counted, the lengths of the batches, and what is said."""


class SaveInside(Callback):
    """Saves a checkpoint after the second step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_step_end(self, trainer: Any, module: TrainModule) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def train(degrees: dict[str, int], counts: str, lengths: Any, path: str = "", *, resumes: bool = False) -> Any:
    seed_everything(1, verbose=False)
    module, generator = Model(12, counts), torch.Generator().manual_seed(1)
    texts = [torch.randint(32, (3, length + 1), generator=generator) for length in lengths]
    batches: Any = [(text[:, :-1], text[:, 1:], torch.arange(3) + 3 * index) for index, text in enumerate(texts)]
    trainer = double_trainer(
        strategy=ParallelStrategy(**degrees) if world_size() > 1 else "single",
        max_epochs=1,
        accumulate_grad_batches=degrees.get("pp", 1),
        num_sanity_val_steps=1,
        callbacks=[SaveInside(path)] if path and not resumes else [],
    )
    loader: Any = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, loader if counts == "metrics" else None, ckpt_path=path if resumes else None)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, module.ids


def run(degrees: dict[str, int], *, is_first: bool = True) -> dict[str, Any]:
    calm_down()
    ends: dict[str, Any] = {"counted": train(degrees, "metrics", (8, 4, 8, 8))}
    for counts, lengths in REFUSED if is_first and world_size() > 1 else ():
        try:
            ends[f"{counts} {lengths}"] = train(degrees, counts, lengths)
        except ModuleError as error:
            ends[f"{counts} {lengths}"] = str(error)
    return ends


def test_metric_objects_count_each_sample_and_token_once_and_what_differs_is_refused() -> None:
    (alone,) = run_ranks(run, 1, {})
    for end in run_ranks(run, 2, {"cp": 2}, timeout=400):
        check(end["counted"], alone["counted"])
        for (counts, lengths), text in REFUSED.items():
            assert re.search(text, str(end[f"{counts} {lengths}"])), end[f"{counts} {lengths}"]


def check(end: Any, alone: Any) -> None:
    assert end[1] == alone[1] == sorted(float(index) for index in range(12))
    for name, value in alone[0].items():
        assert end[0][name] == pytest.approx(value, rel=1e-9), name


def resume(degrees: dict[str, int], path: str) -> Any:
    calm_down()
    return [train(degrees, "metrics", (8, 4, 8, 8), path, resumes=resumes)[0] for resumes in (False, True)]


def test_what_objects_counted_before_a_stop_counts_once_after_it(tmp_path: Any) -> None:
    for whole, resumed in run_ranks(resume, 2, {"cp": 2}, str(tmp_path / "inside"), timeout=400):
        assert resumed == pytest.approx(whole, rel=1e-9)
        assert resumed["samples"] == 12


@pytest.mark.parametrize(
    "degrees", [{"pp": 2, "cp": 2}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.only_in_sweep)]
)
def test_samples_count_once_where_stages_or_layers_are_split_as_well(degrees: dict[str, int]) -> None:
    (alone,) = run_ranks(run, 1, degrees)
    for end in run_ranks(run_once, 4, degrees, timeout=400):
        check(end, alone["counted"])


def run_once(degrees: dict[str, int]) -> Any:
    return run(degrees, is_first=False)["counted"]


@pytest.mark.only_in_sweep
def test_a_sequence_that_is_longer_on_one_data_rank_only_is_compared_on_all() -> None:
    ends = run_ranks(run_shards, 4, {"cp": 2, "dp_shard": 2}, timeout=400)
    assert all(end[0]["samples"] == 12 for end, _ in ends)
    assert all("layers.0.window_size=12" in said for _, said in ends)


def run_shards(degrees: dict[str, int]) -> Any:
    calm_down()
    counted = train(degrees, "metrics", (8, 4, 8, 6))
    try:
        return counted, train(degrees, "nothing", (8, 4, 8, 16))
    except Exception as error:  # noqa: BLE001 - a rank may learn of it from another
        return counted, str(error)
