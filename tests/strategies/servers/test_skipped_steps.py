"""16-mixed with servers: what overflows on one trainer is skipped on all and on the servers, as under ddp."""

from typing import Any

import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import DDPOptions, DDPStrategy, ParameterServerStrategy, RemoteEmbedding, TrainModule


class Heads(TrainModule):
    """Two heads with an optimizer each, of which a step uses one, and losses that overflow on one rank in step 2."""

    def __init__(self, num_rows: int = 0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.table = RemoteEmbedding(num_rows, 8) if num_rows else None
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.register_buffer("scales", torch.zeros(16))
        self.register_buffer("skipped", torch.zeros(16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.body(batch[0])
        if self.table is not None:
            hidden = hidden + self.table(batch[0][:, 0].abs().long())
        head = self.heads[self.global_step % 3 % 2]
        loss = (head(hidden.relu()).float() - batch[1]).square().mean()
        return loss * 1e38 * 1e6 if self.global_step == 2 and self.global_rank == 1 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales[self.global_step] = self.trainer.scaler.get_scale()
        self.skipped[self.global_step] = self.trainer.counters.skipped_steps

    def configure_optimizers(self) -> Any:
        shared = [*self.body.parameters(), *([] if self.table is None else self.table.parameters())]
        return [
            torch.optim.SGD([*shared, *self.heads[0].parameters()], lr=0.1),
            torch.optim.AdamW(self.heads[1].parameters(), lr=0.1),
        ]


def trained(strategy: Any, devices: int = 2, num_rows: int = 0, num_samples: int = 44, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = Heads(num_rows)
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(3))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // devices)
    made = quiet(strategy=strategy, devices=devices, precision="16-mixed", max_epochs=2, **settings)
    made.fit(module, data)
    return module.state_dict()


def test_an_optimizer_without_gradients_in_a_step_waits_for_the_next() -> None:
    found = trained("single", 1)
    assert found["skipped"].max() > 0
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize(
    ("dense", "settings"),
    [
        pytest.param("servers", {}, marks=pytest.mark.only_in_sweep),
        ("servers", {"gradient_clip_val": 0.1}),
        ("ddp", {"num_rows": 8, "num_samples": 41, "accumulate_grad_batches": 2}),
    ],
    ids=["plain", "clipped", "tables"],
)
def test_steps_are_those_of_ddp(dense: Any, settings: dict[str, Any]) -> None:
    reduced = trained(DDPStrategy(find_unused_parameters=True), **settings)
    ddp = DDPOptions(find_unused_parameters=True) if dense == "ddp" else None
    served = trained(ParameterServerStrategy(1, dense=dense, ddp=ddp), **settings)
    assert served["skipped"].max() > 0
    torch.testing.assert_close(served, reduced, rtol=0, atol=1e-6)
