"""Weights that are tied by their memory stay tied, in processes that the trainer starts and in another dtype."""

import pytest
import torch
from as_rank import double_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import TrainModule, seed_everything
from echelon.common.errors import ModuleError
from echelon.strategies.distributed.pickling import pack_value, unpack_value
from echelon.strategies.state.shared_memory import kept_shared


class Tied(TrainModule):
    """Ties a decoder to its encoder by memory, and two views to a fused weight."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight.data = self.encoder.weight.data
        self.fused = nn.Parameter(torch.randn(6, 3))
        self.register_buffer("first", self.fused.data[:3], persistent=False)

    def training_step(self, batch, batch_idx):
        hidden = self.encoder(batch[0]) @ self.fused[3:].T
        return (self.decoder(hidden) @ self.first).square().mean() + self.fused.square().sum() / 9

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)

    def on_train_end(self):
        assert self.decoder.weight.data_ptr() == self.encoder.weight.data_ptr()
        assert torch.equal(self.first, self.fused[:3])


def is_tied(module):
    return (
        module.decoder.weight.data_ptr() == module.encoder.weight.data_ptr()
        and module.first.data_ptr() == module.fused.data_ptr()
    )


def fit(dtype=torch.float64, **settings):
    seed_everything(3, verbose=False)
    module = Tied()
    with kept_shared(module):
        module.to(dtype)
    data = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double())
    double_trainer(max_epochs=2, **settings).fit(module, DataLoader(data, 4 // settings.get("devices", 1)))
    assert is_tied(module)
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_tensors_that_share_memory_share_it_after_pickling_and_with_an_optimizer():
    module = Tied()
    module.counts = torch.zeros(4, dtype=torch.uint16)
    module.also_counts = module.counts.view(2, 2)
    copy, optimizer, view = unpack_value(
        pack_value((module, module.configure_optimizers(), module.encoder.weight.data[1:]))
    )
    assert is_tied(copy) and view.storage_offset() == 3
    assert view.untyped_storage().data_ptr() == copy.encoder.weight.data_ptr() != module.encoder.weight.data_ptr()
    assert optimizer.param_groups[0]["params"][0] is next(copy.parameters())
    assert copy.also_counts.data_ptr() == copy.counts.data_ptr()
    large = torch.zeros(100_000)
    assert len(pack_value([large, large[1:], large.view(100, 1000)])) < 1.1 * len(pack_value(large))


def test_memory_is_shared_after_a_conversion_where_it_was_before():
    module = Tied()
    module.alone = nn.Parameter(torch.ones(2))
    with kept_shared(module):
        module.to(torch.bfloat16)
    assert is_tied(module) and module.fused.dtype == module.first.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*find_unused:UserWarning")
def test_tied_weights_train_as_in_one_process_or_are_refused_by_name():
    expected = fit()
    for settings in ({"dtype": torch.float32}, {"strategy": "ddp", "devices": 2}):
        found = fit(**settings)
        tolerance = 1e-6 if "dtype" in settings else 1e-12
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=f"{settings}: {{}}".format)
    for strategy in ("zero", "fsdp"):
        with pytest.raises(ModuleError, match=r"\w+(\.weight)? and \w+(\.weight)? of Tied are two tensors in the"):
            fit(strategy=strategy, devices=2)
