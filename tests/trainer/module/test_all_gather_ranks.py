"""`self.all_gather` on two ranks: Lightning's shapes and gradients, and an error on both ranks for uneven shapes."""

import pytest
import torch
import torch.distributed as dist
from small import Regression, loader

from echelon import RunError, Trainer
from echelon.testing import run_ranks


class Gathering(Regression):
    def on_train_start(self):
        rank = self.global_rank
        self.shape = tuple(self.all_gather(torch.ones(3, 2)).shape)
        numbers = self.all_gather({"rank": rank, "more": [torch.tensor(rank + 0.5)]})
        self.numbers = numbers["rank"].tolist(), numbers["more"][0].tolist()
        groups = None, dist.group.WORLD
        self.gradients = [self.gradient(group, sync_grads=syncs) for group in groups for syncs in (True, False)]
        try:
            self.all_gather({"x": torch.ones(3), "features": torch.ones(3 - rank, 2)})
        except RunError as error:
            self.error = str(error)

    def gradient(self, group, *, sync_grads):
        x = torch.ones(3, requires_grad=True)
        gathered = self.all_gather(x * 1.0, group, sync_grads=sync_grads)
        if gathered.requires_grad:
            (gathered * torch.tensor([[1.0], [2.0]]) * (self.global_rank + 1)).sum().backward()
        return None if x.grad is None else x.grad.tolist()


def gather():
    module = Gathering()
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    Trainer(strategy="ddp", accelerator="cpu", max_steps=1, logger=False, **settings).fit(module, loader(4, 2))
    return module.shape, module.numbers, module.gradients, module.error


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(gather, 2)


def test_tensors_and_numbers_get_a_dimension_of_ranks(of_ranks):
    for shape, numbers, _, _ in of_ranks:
        assert shape == (2, 3, 2)
        assert numbers == ([0, 1], [0.5, 1.5])


def test_gradients_flow_back_to_their_rank_on_request_also_in_a_group(of_ranks):
    # the derivative: the sum, over all ranks, of each rank's derivative by this rank's tensor
    for rank, (_, _, gradients, _) in enumerate(of_ranks):
        assert gradients == [[3.0 * (rank + 1)] * 3, None] * 2


def test_uneven_shapes_are_an_error_by_name_on_every_rank(of_ranks):
    for _, _, _, error in of_ranks:
        assert "data['features'] must have the same shape on every rank, got (3, 2) on rank 0 and (2, 2) on" in error
