"""A GAN that draws the digits it is asked for: two networks, two optimizers, and a training step that uses both."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.utils import make_grid, save_image

import echelon


class DigitsData(echelon.DataModule):
    """The 1797 images of 8 x 8 pixels that come with scikit-learn, with their labels."""

    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        dataset = TensorDataset(images.float().view(-1, 1, 8, 8) / 8 - 1, labels)
        return DataLoader(dataset, self.hparams.batch_size, shuffle=True, drop_last=True)


class Generator(nn.Module):
    """Draws an image from random numbers and a digit."""

    def __init__(self, latent, width):
        super().__init__()
        self.digit = nn.Embedding(10, latent)
        self.layers = nn.Sequential(
            nn.Linear(2 * latent, 4 * width * 4),
            nn.Unflatten(1, (4 * width, 2, 2)),
            *(nn.BatchNorm2d(4 * width), nn.ReLU(), nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False)),
            *(nn.BatchNorm2d(2 * width), nn.ReLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False)),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1), nn.Tanh()),
        )

    def forward(self, noise, digits):
        return self.layers(torch.cat([noise, self.digit(digits)], dim=1))


class Discriminator(nn.Module):
    """Tells whether an image is a real one of the given digit."""

    def __init__(self, width):
        super().__init__()
        self.digit = nn.Embedding(10, 64)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Flatten(), nn.Linear(4 * width * 4, 1)),
        )

    def forward(self, images, digits):
        wanted = self.digit(digits).view(-1, 1, 8, 8)
        return self.layers(torch.cat([images, wanted, spread(images, digits).expand_as(images)], dim=1))


def spread(images, digits):
    """Return how much the images of a digit differ; without it, the discriminator would let all look the same."""
    belongs = F.one_hot(digits, 10).float()
    mean_of = belongs.T / belongs.sum(0).clamp(min=1).unsqueeze(1)
    pixels = images.flatten(1)
    variance = mean_of @ pixels.square() - (mean_of @ pixels).square()
    return (variance.clamp(min=0) + 1e-6).sqrt().mean(1)[digits].view(-1, 1, 1, 1)


class GAN(echelon.TrainModule):
    """Generator against discriminator (Goodfellow et al. 2014), both told the digit (Mirza & Osindero 2014)."""

    def __init__(self, latent: int = 32, width: int = 16, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent, width)
        self.discriminator = Discriminator(width)
        self.register_buffer("noise", torch.randn(80, latent))
        self.register_buffer("digits", torch.arange(10).repeat(8))

    def training_step(self, batch, batch_idx):
        images, digits = batch
        noise = torch.randn(len(images), self.hparams.latent, device=self.device)
        generator, discriminator = self.optimizers()

        self.toggle_optimizer(discriminator)
        real = self.discriminator(images, digits)
        fake = self.discriminator(self.generator(noise, digits).detach(), digits)
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        self.take_step(discriminator, loss)
        self.untoggle_optimizer(discriminator)
        self.log("loss/discriminator", loss, prog_bar=True)

        self.toggle_optimizer(generator)
        loss = F.softplus(-self.discriminator(self.generator(noise, digits), digits)).mean()
        self.take_step(generator, loss)
        self.untoggle_optimizer(generator)
        self.log("loss/generator", loss, prog_bar=True)

    def take_step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        lr = self.hparams.lr
        return [
            torch.optim.Adam(self.generator.parameters(), lr, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr, betas=(0.5, 0.999)),
        ]

    @torch.no_grad()
    def draw(self):
        """Return a picture with a column of 8 drawings for each digit, from the same noise each time."""
        self.generator.eval()
        images = self.generator(self.noise, self.digits)
        self.generator.train()
        return F.interpolate(make_grid(images, nrow=10, padding=1, normalize=True)[None], scale_factor=8)[0]

    def on_train_epoch_end(self):
        if isinstance(self.logger, echelon.TensorBoardLogger) and self.current_epoch % 10 == 9:
            self.logger.experiment.add_image("samples", self.draw(), self.global_step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=80)

    torch.set_num_threads(1)  # for images this small a second thread costs more than it gains
    echelon.seed_everything(1)
    module = GAN()
    trainer = echelon.Trainer(max_epochs=parser.parse_args().max_epochs, log_every_n_steps=10)
    trainer.fit(module, datamodule=DigitsData())

    picture = Path(trainer.log_dir) / "samples.png"
    save_image(module.draw(), picture)
    print(f"Samples: {picture}")
