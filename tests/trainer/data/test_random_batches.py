"""Random numbers drawn for a batch (collate_fn, ``__getitems__``) are the same with workers, and on several ranks."""

import pytest
import torch
from in_step import on_ranks
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData


class Many(Dataset):
    """Reads the samples of a batch together, with noise."""

    def __len__(self):
        return 12

    def __getitems__(self, indices):
        noise = torch.rand(len(indices))
        return [(indices[place] + noise[place], noise[place]) for place in range(len(indices))]


def mixed(samples):
    x, y = default_collate(samples)
    return [x + torch.rand(1), y[torch.randperm(len(y))]]


def in_memory():
    return TensorDataset(torch.arange(12.0), torch.arange(12.0))


def read(dataset, collate, workers, data_size):
    def of_rank(ranks):
        loader = DataLoader(dataset, 3, shuffle=True, num_workers=workers, collate_fn=collate)
        # micro-batches are the same, on one rank two for each step
        data = TrainData(loader, seed=0, cut=Cut(2 // data_size, None, ranks), limit=1.0, in_order=False)
        data.begin_epoch(0)
        return [(one.place, [x.tolist() for x in one.batch]) for window in data.windows(0) for one in window]

    return sorted(batch for batches in on_ranks(data_size, of_rank) for batch in batches)


@pytest.mark.parametrize(("build", "collate"), [(in_memory, mixed), (Many, None), (Many, mixed)])
def test_random_numbers_of_a_batch_depend_on_its_place_alone(build, collate):
    alone = read(build(), collate, workers=0, data_size=1)
    assert len(alone) == 4
    assert read(build(), collate, workers=1, data_size=1) == alone
    assert read(build(), collate, workers=0, data_size=2) == alone
