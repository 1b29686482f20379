"""Sharpness-aware minimization as davda54/sam is used: two forward and backward passes a step, manual optimization."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH = 3, 16


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = torch.stack(norms).norm(p=2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (grad_norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def original():
    torch.manual_seed(4)
    model = build()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for _epoch in range(EPOCHS):
        for inputs, targets in DataLoader(data(), BATCH):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.second_step(zero_grad=True)
            losses.append(loss.item())
    return losses, model


class Sharpness(TrainModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = build()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.model(inputs), targets)
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(F.cross_entropy(self.model(inputs), targets))
        optimizer.second_step(zero_grad=True)
        self.log("loss", loss)

    def configure_optimizers(self):
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def ported(world_size=1, **settings):
    seed_everything(4)
    module = Sharpness()
    Trainer(max_epochs=EPOCHS, **settings).fit(module, DataLoader(data(), BATCH // world_size))
    return module.model
