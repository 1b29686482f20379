"""Half precision in shards: parameters stay float32, computation does not, and all ranks know of an overflow."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks

GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(TrainModule):
    """Norms before, in and after the blocks; the first gets the contents of the batch."""

    def __init__(self, norm=nn.Identity, spike=False):
        super().__init__()
        self.spike = spike
        self.first, self.embed, self.norm = nn.LayerNorm(3), nn.Linear(3, 6), norm()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 4)
        self.losses, self.seen, self.scales = [], {}, []

    def forward(self, x):
        x = self.norm(self.embed(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) + nn.functional.mse_loss(logits[:, :3], x)
        if self.spike and batch_idx == 1:  # of one row, and so in the shard of one rank
            loss = loss + (self.head.bias[0] * 6e4).float() * 1e4
        self.seen = {"weight": self.head.weight.dtype, "batch": x.dtype, "logits": logits.dtype, "loss": loss.dtype}
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.strategy.site.scaling.scaler.get_scale())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.03)


def train(precision, strategy, num_ranks, **options):
    seed_everything(3, verbose=False)
    module = Net(**options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision=precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * GLOBAL_BATCH, 3, generator=generator)
    loader = DataLoader(TensorDataset(x, x.argmax(dim=1)), GLOBAL_BATCH // num_ranks)
    trainer.fit(module, loader)
    kept = frozenset(parameter.dtype for parameter in module.parameters())
    return {
        "state": trainer.strategy.full_model_state(),
        "losses": trainer.strategy.all_reduce(torch.tensor(module.losses), "mean").tolist(),
        "seen": {**module.seen, "kept": kept, "predicted": trainer.predict(module, loader)[0].dtype},
        "scales": module.scales,
        "skipped": trainer.counters.skipped_steps,
        "buffers": {name: buffer.dtype for name, buffer in module.named_buffers()},
    }


def train_all():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    found = {p: train(p, FSDPStrategy(), 2) for p in ("bf16-mixed", "16-mixed", "bf16-true")}
    found["overflow"] = train("16-mixed", FSDPStrategy(), 2, spike=True)
    found["batch norm"] = train("bf16-mixed", FSDPStrategy(), 2, norm=lambda: nn.BatchNorm1d(6))
    found["given"] = train("32-true", FSDPStrategy(mixed_precision=given), 2)
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(train_all, 2)


@pytest.mark.parametrize(("precision", "bound"), [("bf16-mixed", 0.02), ("16-mixed", 0.003), ("bf16-true", 0.05)])
def test_the_losses_are_those_of_one_process_within_a_bound(precision, bound, found):
    expected = train(precision, "single", 1)
    assert found[0][precision]["losses"] == pytest.approx(expected["losses"], rel=bound)
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_mixed_precision_computes_in_half_and_keeps_float32(precision, dtype, found):
    for rank in found:
        seen = rank[precision]["seen"]
        assert (seen["kept"], seen["weight"], seen["logits"]) == ({torch.float32}, dtype, dtype)
        assert (seen["batch"], seen["loss"], seen["predicted"]) == (torch.float32, torch.float32, torch.float32)


def test_true_precision_keeps_nothing_else(found):
    assert set(found[0]["bf16-true"]["seen"].values()) == {torch.bfloat16} | {frozenset({torch.bfloat16})}


def test_a_policy_of_the_users_own_is_obeyed(found):
    seen = found[0]["given"]["seen"]
    assert (seen["kept"], seen["weight"], seen["batch"]) == ({torch.float32}, torch.bfloat16, torch.bfloat16)


def test_an_overflow_in_the_shard_of_one_rank_is_known_to_all(found):
    first, second = (rank["overflow"] for rank in found)
    assert first["skipped"] == second["skipped"] > 0
    assert first["scales"] == second["scales"]
    assert any(later == earlier / 2 for earlier, later in pairwise(first["scales"]))
    assert all(tensor.isfinite().all() for tensor in first["state"].values())


def test_batch_norms_keep_their_statistics_in_float32(found):
    for rank in found:
        buffers = rank["batch norm"]["buffers"]
        assert {buffers["norm.running_mean"], buffers["norm.running_var"]} == {torch.float32}
