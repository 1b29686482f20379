"""A GAN ported from Lightning: manual optimization, custom and lambda callbacks; and overridden optimizer hooks."""

import os
from collections import OrderedDict

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, CSVLogger, TensorBoardLogger, Trainer, TrainModule, seed_everything
from echelon.callbacks import LambdaCallback, ModelCheckpoint


class Generator(nn.Module):
    def __init__(self, latent_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent_dim, 64), nn.LeakyReLU(0.2), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Sigmoid()
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, image):
        return self.net(image)


class GAN(TrainModule):
    def __init__(self, latent_dim: int = 16, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(self.hparams.latent_dim)
        self.discriminator = Discriminator()
        self.register_buffer("validation_z", torch.randn(8, self.hparams.latent_dim))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, logits, is_real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch, batch_idx):
        (images,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], self.hparams.latent_dim).type_as(images)

        self.toggle_optimizer(optimizer_g)
        assert not any(p.requires_grad for p in self.discriminator.parameters())
        g_loss = self.adversarial_loss(self.discriminator(self(z)), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.clip_gradients(optimizer_g, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()
        return OrderedDict(g_loss=g_loss.detach(), d_loss=d_loss.detach())

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9) for o in (optimizer_g, optimizer_d)]
        return [optimizer_g, optimizer_d], schedulers

    def on_train_epoch_end(self):
        with torch.no_grad():
            sample = self(self.validation_z.type_as(self.generator.net[0].weight))
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", sample.view(8, 8, 8).reshape(1, 64, 8), self.current_epoch)
        self.log("sample_mean", sample.mean())


class Critic(TrainModule):
    """Tells the GAN's images from real ones: warmed up, clipped and scheduled through overridden hooks."""

    def __init__(self, lr: float = 0.05, warmup_steps: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.net = Discriminator()
        self.scheduler_calls = 0
        self.grad_norm = 0.0

    def training_step(self, batch, batch_idx):
        images, is_real = batch
        loss = F.binary_cross_entropy_with_logits(self.net(images), is_real)
        self.log("critic_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, is_real = batch
        accuracy = ((self.net(images) > 0) == (is_real > 0.5)).float().mean()
        self.log("critic_acc", accuracy, prog_bar=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.last_val_epoch = self.current_epoch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs),
        }

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < self.hparams.warmup_steps:
            scale = min(1.0, float(self.trainer.global_step + 1) / self.hparams.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.hparams.lr

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def on_before_optimizer_step(self, optimizer):
        self.grad_norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.log("grad_norm", self.grad_norm)

    def lr_scheduler_step(self, scheduler, metric):
        self.scheduler_calls += 1
        scheduler.step()


class LossHistory(Callback):
    def __init__(self):
        self.losses = []

    def on_train_start(self, trainer, pl_module):
        self.started_on = str(pl_module.device)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append({name: float(value) for name, value in outputs.items()})

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state_dict):
        self.losses = state_dict["losses"]


def main(root="."):
    seed_everything(3)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    history = LossHistory()
    epochs = []
    trainer = Trainer(
        default_root_dir=root,
        max_epochs=5,
        accelerator="cpu",
        logger=[TensorBoardLogger(root, name="tb"), CSVLogger(root, name="csv")],
        callbacks=[
            history,
            LambdaCallback(on_train_epoch_end=lambda trainer, pl_module: epochs.append(trainer.current_epoch)),
            ModelCheckpoint(save_last=True, every_n_epochs=1),
        ],
    )
    trainer.fit(GAN(), DataLoader(TensorDataset(images), batch_size=64, shuffle=True))
    gan = GAN.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, lr=1e-4)
    gan.freeze()

    fake = gan(torch.randn(len(images), gan.hparams.latent_dim))
    labels = torch.cat([torch.ones(len(images), 1), torch.zeros(len(images), 1)])
    train_set = TensorDataset(torch.cat([images, fake]), labels)
    critic = Critic()
    critic_trainer = Trainer(
        default_root_dir=os.path.join(root, "critic"),
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=0.5,
        num_sanity_val_steps=1,
        callbacks=ModelCheckpoint(monitor="critic_acc", mode="max"),
    )
    critic_trainer.fit(
        critic,
        train_dataloaders=DataLoader(train_set, batch_size=64, shuffle=True),
        val_dataloaders=DataLoader(train_set, batch_size=256),
    )
    return trainer, gan, history, epochs, critic_trainer, critic


if __name__ == "__main__":
    main()
