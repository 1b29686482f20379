"""pytorch/examples' dcgan: two networks and two Adams; the noise comes from a generator that all processes share."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH, NZ, NGF, NDF = 2, 8, 6, 8, 8
ADAM = {"lr": 0.0002, "betas": (0.5, 0.999)}


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.GroupNorm):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def build_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NZ, NGF, 4, 1, 0, bias=False),
        nn.GroupNorm(2, NGF),
        nn.ReLU(True),
        nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def build_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, NDF, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(NDF, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def images():
    return TensorDataset(torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(7)) * 2 - 1)


def original():
    torch.manual_seed(9)
    net_g, net_d = build_generator().apply(weights_init), build_discriminator().apply(weights_init)
    criterion = nn.BCELoss()
    optimizer_d, optimizer_g = (
        torch.optim.Adam(net_d.parameters(), **ADAM),
        torch.optim.Adam(net_g.parameters(), **ADAM),
    )
    generator = torch.Generator().manual_seed(10)
    losses = []
    for _epoch in range(EPOCHS):
        for (real,) in DataLoader(images(), BATCH):
            net_d.zero_grad()
            err_d_real = criterion(net_d(real), torch.ones(len(real)))
            err_d_real.backward()
            fake = net_g(torch.randn(len(real), NZ, 1, 1, generator=generator))
            err_d_fake = criterion(net_d(fake.detach()), torch.zeros(len(real)))
            err_d_fake.backward()
            optimizer_d.step()
            net_g.zero_grad()
            err_g = criterion(net_d(fake), torch.ones(len(real)))
            err_g.backward()
            optimizer_g.step()
            losses += [(err_d_real + err_d_fake).item(), err_g.item()]
    return losses, nn.ModuleList([net_g, net_d])


class DCGAN(TrainModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net_g, self.net_d = build_generator().apply(weights_init), build_discriminator().apply(weights_init)
        self.criterion = nn.BCELoss()
        self.generator = torch.Generator().manual_seed(10)

    def noise(self, batch_size):
        """Draw the noise of the global batch, and keep the rows of this process."""
        ranks, rank = self.trainer.strategy.data_size, self.trainer.strategy.data_rank
        return torch.randn(batch_size * ranks, NZ, 1, 1, generator=self.generator).chunk(ranks)[rank]

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_d, optimizer_g = self.optimizers()
        optimizer_d.zero_grad()
        err_d_real = self.criterion(self.net_d(real), torch.ones(len(real)))
        self.manual_backward(err_d_real)
        fake = self.net_g(self.noise(len(real)))
        err_d_fake = self.criterion(self.net_d(fake.detach()), torch.zeros(len(real)))
        self.manual_backward(err_d_fake)
        optimizer_d.step()
        optimizer_g.zero_grad()
        err_g = self.criterion(self.net_d(fake), torch.ones(len(real)))
        self.manual_backward(err_g)
        optimizer_g.step()
        self.log_dict({"loss": err_d_real + err_d_fake, "loss_g": err_g})

    def configure_optimizers(self):
        return torch.optim.Adam(self.net_d.parameters(), **ADAM), torch.optim.Adam(self.net_g.parameters(), **ADAM)


def ported(world_size=1, **settings):
    seed_everything(9)
    module = DCGAN()
    Trainer(max_epochs=EPOCHS, **settings).fit(module, DataLoader(images(), BATCH // world_size))
    return nn.ModuleList([module.net_g, module.net_d])
