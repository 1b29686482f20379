"""A tagger over a map-style data set in the manner of Hugging Face `datasets`: columns, dicts, ``__getitems__``."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH = 2, 8


class Columns:
    """A table: an item is a dict, several are asked for at once, a transform is applied when they are read."""

    def __init__(self, columns):
        self.columns, self.transform = columns, None

    def __len__(self):
        return len(self.columns["text"])

    def __getitem__(self, index):
        rows = self.__getitems__([index])
        return rows[0]

    def __getitems__(self, indices):
        batch = {name: [column[index] for index in indices] for name, column in self.columns.items()}
        batch = self.transform(batch) if self.transform is not None else batch
        return [{name: batch[name][row] for name in batch} for row in range(len(indices))]

    def with_transform(self, transform):
        dataset = Columns(self.columns)
        dataset.transform = transform
        return dataset


def tokenize(batch):
    return {"input_ids": [[ord(c) - 96 for c in text] for text in batch["text"]], "label": batch["label"]}


def dataset():
    texts = ["".join(chr(97 + (i * i + j * (i % 5 + 1)) % 26) for j in range(4 + i % 3)) for i in range(40)]
    return Columns({"text": texts, "label": [float("a" in text) for text in texts]}).with_transform(tokenize)


def collate(features):
    width = max(len(feature["input_ids"]) for feature in features)
    padded = [feature["input_ids"] + [0] * (width - len(feature["input_ids"])) for feature in features]
    return {"input_ids": torch.tensor(padded), "labels": torch.tensor([feature["label"] for feature in features])}


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(27, 8, padding_idx=0)
        self.score = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, input_ids, labels):
        lengths = (input_ids > 0).sum(dim=1, keepdim=True)
        logits = self.score(self.embed(input_ids).sum(dim=1) / lengths).squeeze(1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def make_optimizer(model):
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


class Permutation(RandomSampler):
    """A shuffle that torch's loop and the trainer read in the same order: its generator is seeded by the epoch."""

    def __init__(self, data):
        super().__init__(data)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


def original():
    torch.manual_seed(15)
    model, data = Bag(), dataset()
    sampler = Permutation(data)
    loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate)
    optimizer, scheduler = make_optimizer(model)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step(sum(losses[-len(loader) :]) / len(loader))
    return losses, model


class BagOfLetters(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = Bag()

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("loss", outputs["loss"], on_step=True, on_epoch=True)
        return outputs

    def configure_optimizers(self):
        optimizer, scheduler = make_optimizer(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


def ported(**settings):
    seed_everything(15)
    module, data = BagOfLetters(), dataset()
    loader = DataLoader(data, BATCH, sampler=Permutation(data), collate_fn=collate)
    Trainer(max_epochs=EPOCHS, global_batch_size=BATCH, **settings).fit(module, loader)
    return module.model
