"""Other kinds of modules whose steps are estimated: recurrent, strided, tied, frozen, sparse, partly used, by hand."""

import torch
from planned_modules import GPT, Classifier
from torch import nn
from torch.nn import functional as F

from echelon import TrainModule, linear_cross_entropy


class Tagger(Classifier):
    """An LSTM, whose workspace on a CPU a tensor without memory does not have."""

    inputs = (24, 16)

    def build(self):
        self.lstm = nn.LSTM(16, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Strided(Classifier):
    """Convolutions with strides, batch norms whose buffers are sent, and activations in place."""

    inputs = (3, 32, 32)

    def build(self):
        widths = ((3, 16), (16, 32), (32, 64))
        self.layers = nn.Sequential(*(self.block(before, after) for before, after in widths))
        self.head = nn.Linear(64, 10)

    def block(self, before, after):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


class TiedGPT(GPT):
    """A head that shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.token.weight


class WithoutLogits(GPT):
    """A loss that computes the logits of some tokens at a time."""

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        x = self.token(tokens) + self.position(self.trainer.strategy.positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(self.norm(x), self.head, targets)


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class LoRA(Classifier):
    """Frozen layers, each with a small one beside it that is trained."""

    inputs = (128,)

    def build(self):
        self.layers = nn.Sequential(*(nn.Sequential(Adapted(128), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.layers(x))


class Experts(Classifier):
    """Experts of which the step uses only half."""

    inputs = (64,)

    def build(self):
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return self.head(sum(weights[:, i, None] * self.experts[i](x) for i in range(2)))


class Bags(TrainModule):
    """Sparse gradients, of an embedding bag and of an embedding."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(4000, 32, mode="sum", sparse=True)
        self.table = nn.Embedding(4000, 16, sparse=True)
        self.head = nn.Linear(48, 10)

    @staticmethod
    def samples(number):
        return torch.randperm(4000)[: number * 6].view(number, 6), torch.randint(10, (number,))

    def training_step(self, batch, batch_idx):
        ids, classes = batch
        return F.cross_entropy(self.head(torch.cat([self.bag(ids), self.table(ids).sum(1)], 1)), classes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ByHand(TrainModule):
    """Two optimizers in manual optimization, and a backward for each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, 1000)

    @staticmethod
    def samples(number):
        return torch.randn(number, 64), torch.randint(1000, (number,))

    def training_step(self, batch, batch_idx):
        x, classes = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.head(self.body(x)), classes))
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.body.parameters(), lr=1e-3),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]


class Dropped(Classifier):
    """Dropout, and an optimizer with three moments."""

    inputs = (64,)

    def build(self):
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(3)))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.layers(x))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, momentum=0.9, centered=True)
