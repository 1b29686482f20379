"""A loader without workers is read as its own iterator would read it, batch for batch and call for call."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, TensorDataset

from echelon.trainer.data.in_process import batches_of, reader_of
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.map_stream import MapStream
from echelon.trainer.data.stream import Cut


class Items(Dataset):
    def __init__(self):
        self.calls = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.calls.append(index)
        if index == 9:
            raise StopIteration
        return {"x": torch.tensor([index, index + 1]), "name": str(index)}


class ManyItems(Items):
    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [torch.tensor(index) for index in indices]


class NoManyItems(Items):
    __getitems__ = None


class Stream(IterableDataset):
    def __init__(self):
        self.calls = []

    def __iter__(self):
        self.calls.append("iter")
        for index in range(7):
            self.calls.append(index)
            yield torch.rand(2) + index


class Sized(Stream):
    def __len__(self):
        return 2


class Pipe(IterDataPipe):
    def __iter__(self):
        return iter(range(3))


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter([1])


def plain(batch):
    return repr(batch)


@pytest.mark.parametrize("kind", [Items, ManyItems, NoManyItems])
@pytest.mark.parametrize(
    "settings", [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 4, "collate_fn": list, "drop_last": True}]
)
def test_the_batches_of_indices_are_those_of_the_loader(kind, settings):
    def read(batches_from):
        dataset = kind()
        batches = batches_from(DataLoader(dataset, **settings))
        return [plain(batch) for batch in batches], dataset.calls

    def by_reader(loader):
        reader = reader_of(loader)
        return map(reader, loader.batch_sampler or loader.sampler)

    assert read(by_reader) == read(iter)


@pytest.mark.parametrize(
    "settings", [{"batch_size": None}, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": 9}]
)
@pytest.mark.parametrize("has_generator", [False, True])
def test_the_batches_of_a_stream_are_those_of_the_loader(settings, has_generator):
    def read(batches_from):
        torch.manual_seed(3)
        dataset, generator = Stream(), torch.Generator().manual_seed(4) if has_generator else None
        batches = [plain(batch) for batch in batches_from(DataLoader(dataset, generator=generator, **settings))]
        return batches, dataset.calls, torch.rand(1), has_generator and torch.rand(1, generator=generator)

    assert read(batches_of) == read(iter)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Items(), num_workers=1),
        DataLoader(Items(), pin_memory=True),
        OwnLoader(Items()),
        DataLoader(Pipe(), batch_size=None),
    ],
    ids=["workers", "pinned", "own", "pipe"],
)
def test_what_does_more_than_read_and_collate_is_left_to_its_own_iterator(loader):
    assert reader_of(loader) is None


def test_a_stream_that_gives_more_than_it_announced_is_told_by_torch():
    loader = DataLoader(Sized(), batch_size=None)
    len(loader)
    with pytest.warns(UserWarning, match="was reported to be 2"):
        assert len(list(batches_of(loader))) == 7


def test_batches_that_this_process_makes_are_not_pinned_for_a_data_set_may_be_on_the_gpu():
    """Torch refuses to pin a GPU's tensors; on a machine without a GPU its loader warns that it cannot pin."""
    data = TensorDataset(torch.empty(6, 2, device="meta"))
    for num_workers in (0, 1):
        cut = Cut(1, None, DataRanks(), pins_memory=True)
        stream = MapStream(DataLoader(data, 2, num_workers=num_workers), 7, cut, count=lambda batch: 2)
        if num_workers:
            assert stream._loader.pin_memory
        else:
            assert [micro_batch.batch[0].device.type for micro_batch in stream.micro_batches()] == 3 * ["meta"]
