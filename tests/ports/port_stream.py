"""A stream in the manner of webdataset: shards of tuples, shuffled in a buffer, batched inside the data set."""

import random
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH, LR = 2, 8, 0.005
SHARDS = [f"digits-{number:06d}.tar" for number in range(4)]


def read_shard(name):
    generator = torch.Generator().manual_seed(int(name[7:13]))
    for index in range(20):
        image = torch.rand(1, 8, 8, generator=generator)
        yield {"__key__": f"{name}/{index}", "png": image, "cls": int(image[0, :4].sum() > image[0, 4:].sum())}


class Stream(IterableDataset):
    def __init__(self, batch_size, rank=0, world_size=1):
        self.batch_size, self.rank, self.world_size, self.epoch = batch_size, rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def samples(self):
        chance = random.Random(self.epoch)
        shards = chance.sample(SHARDS, len(SHARDS))
        buffer = []
        for sample in (sample for shard in shards for sample in read_shard(shard)):
            buffer.append((sample["png"], sample["cls"]))
            if len(buffer) == 16:
                yield buffer.pop(chance.randrange(len(buffer)))
        chance.shuffle(buffer)
        yield from buffer

    def __iter__(self):
        own = islice(self.samples(), self.rank, None, self.world_size)
        while batch := list(islice(own, self.batch_size)):
            images, classes = zip(*batch, strict=True)
            yield torch.stack(images), torch.tensor(classes)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))


def original():
    torch.manual_seed(6)
    model = build()
    dataset = Stream(BATCH)
    loader = DataLoader(dataset, batch_size=None)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        for images, classes in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses, model


class StreamClassifier(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = build()

    def train_dataloader(self):
        rank, world_size = self.trainer.strategy.data_rank, self.trainer.strategy.data_size
        return DataLoader(Stream(BATCH // world_size, rank, world_size), batch_size=None)

    def training_step(self, batch, batch_idx):
        images, classes = batch
        loss = F.cross_entropy(self.model(images), classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=LR)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def ported(**settings):
    seed_everything(6)
    module = StreamClassifier()
    Trainer(max_epochs=EPOCHS, **settings).fit(module)
    return module.model
