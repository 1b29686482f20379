"""pytorch/examples' time_sequence_prediction: two LSTM cells, stepped by hand, learn sines with LBFGS and a closure."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule, seed_everything

STEPS, LENGTH = 4, 20
LBFGS = {"lr": 0.8, "max_iter": 3}  # with more iterations, the order of the samples alone changes losses by 1e-6


class Sequence(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.hidden = hidden
        self.lstm1, self.lstm2 = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, inputs):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (inputs.new_zeros(inputs.size(0), self.hidden) for _ in range(4))
        for input_t in inputs.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs.append(self.linear(h_t2))
        return torch.cat(outputs, dim=1)


def sines():
    phase = torch.arange(8.0).unsqueeze(1)
    waves = torch.sin((torch.arange(LENGTH + 1.0) + 4 * phase) / 3)
    return TensorDataset(waves[:, :-1], waves[:, 1:])


def original():
    torch.manual_seed(0)
    inputs, target = sines()[:]
    seq = Sequence()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), **LBFGS)
    losses = []
    for _step in range(STEPS):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(inputs), target)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, seq


class Sines(TrainModule):
    def __init__(self):
        super().__init__()
        self.seq = Sequence()
        self.criterion = nn.MSELoss()
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        loss = self.criterion(self.seq(inputs), target)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Log the loss that the step began with, as the loop does; the optimizer asks for it several times."""
        self.log("loss", self.losses[0])
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), **LBFGS)


def ported(**settings):
    seed_everything(0)
    module = Sines()
    loader = DataLoader(sines(), batch_size=8)
    Trainer(max_epochs=STEPS, global_batch_size=8, **settings).fit(module, loader)
    return module.seq
