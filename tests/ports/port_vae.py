"""pytorch/examples' vae: a loss that is a sum over the batch, and noise drawn inside the model."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import Loss, Trainer, TrainModule, seed_everything

EPOCHS, BATCH, LATENT = 2, 8, 4


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, LATENT), nn.Linear(16, LATENT)
        self.fc3, self.fc4 = nn.Linear(LATENT, 16), nn.Linear(16, 64)

    def forward(self, x, noise):
        h1 = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def images():
    return TensorDataset(torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(16)))


def original():
    torch.manual_seed(17)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # without a generator of its own, each epoch's iterator draws a seed from the one that the noise is drawn from
    loader = DataLoader(images(), BATCH, generator=torch.Generator())
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        for (data,) in loader:
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data, torch.randn(len(data), LATENT))
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


class Autoencoder(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = VAE()

    def on_train_start(self):
        """Continue with rank 0's random numbers everywhere, to draw the noise of the global batch."""
        torch.set_rng_state(self.trainer.strategy.ranks.all.broadcast(torch.get_rng_state()))

    def training_step(self, batch, batch_idx):
        (data,) = batch
        ranks, rank = self.trainer.strategy.data_size, self.trainer.strategy.data_rank
        noise = torch.randn(len(data) * ranks, LATENT).chunk(ranks)[rank]
        recon_batch, mu, logvar = self.model(data, noise)
        loss = loss_function(recon_batch, data, mu, logvar)
        self.log("loss", loss, reduce_fx="sum")
        return Loss(loss, count=1 / ranks)  # of a step the sum over all ranks, not their mean

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def ported(**settings):
    seed_everything(17)
    module = Autoencoder()
    Trainer(max_epochs=EPOCHS, global_batch_size=BATCH, **settings).fit(module, DataLoader(images(), BATCH))
    return module.model
