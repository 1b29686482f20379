"""pytorch/examples' word_language_model: the hidden state is carried from batch to batch, and detached."""

import torch
from torch import nn
from torch.nn import functional as F

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, COLUMNS, BPTT, TOKENS, CLIP, LR = 2, 4, 7, 20, 0.25, 5.0


class RNNModel(nn.Module):
    def __init__(self, width=12, dropout=0.0):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(TOKENS, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=dropout)
        self.decoder = nn.Linear(width, TOKENS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, inputs, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(inputs)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, TOKENS), dim=1), hidden

    def init_hidden(self, columns):
        weight = next(self.parameters())
        return weight.new_zeros(2, columns, 12), weight.new_zeros(2, columns, 12)


def batchify(columns):
    text = (torch.arange(40 * columns) ** 2 // 3) % TOKENS
    return text.view(columns, -1).t().contiguous()


def get_batch(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def repackage_hidden(hidden):
    return tuple(state.detach() for state in hidden)


def original(dropout):
    torch.manual_seed(1111)
    model = RNNModel(dropout=dropout)
    train_data = batchify(COLUMNS)
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        hidden = model.init_hidden(COLUMNS)
        for i in range(0, train_data.size(0) - 1, BPTT):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-LR)
            losses.append(loss.item())
    return losses, model


class LanguageModel(TrainModule):
    def __init__(self, dropout):
        super().__init__()
        self.model = RNNModel(dropout=dropout)

    def train_dataloader(self):
        """Every process has some of the columns and carries its own hidden state on."""
        source = batchify(COLUMNS).chunk(self.trainer.strategy.data_size, dim=1)[self.trainer.strategy.data_rank]
        return Chunks(source)

    def batch_size_of(self, batch):
        return batch[0].shape[1]  # time comes first

    def on_train_epoch_start(self):
        self.hidden = None

    def training_step(self, batch, batch_idx):
        data, targets = batch
        hidden = self.model.init_hidden(data.shape[1]) if self.hidden is None else repackage_hidden(self.hidden)
        output, self.hidden = self.model(data, hidden)
        loss = F.nll_loss(output, targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


class Chunks:
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        for i in range(0, len(self.source) - 1, BPTT):
            yield get_batch(self.source, i)


def ported(dropout, **settings):
    seed_everything(1111)
    module = LanguageModel(dropout)
    Trainer(max_epochs=EPOCHS, gradient_clip_val=CLIP, **settings).fit(module)
    return module.model
