"""Handwritten digits: a small CNN with augmentation reaches over 97% on unseen images in seconds on a laptop's CPU."""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

import echelon


class Images(Dataset):
    """Images and their labels; an image is transformed each time it is read."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


class DigitsData(echelon.DataModule):
    """The 1797 images of 8 x 8 pixels that come with scikit-learn: 1257 to train, 180 to validate, 360 to test."""

    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        images = images.float().view(-1, 1, 8, 8) / 16
        train, val, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1257, 180, 360])
        plain = v2.Normalize([0.3], [0.38])
        shaken = v2.RandomAffine((-12, 12), (0.1, 0.1), (0.85, 1.15), 10, InterpolationMode.BILINEAR)
        self.train = Images(images[train], labels[train], v2.Compose([shaken, plain]))
        self.val = Images(images[val], labels[val], plain)
        self.test = Images(images[test], labels[test], plain)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, self.hparams.batch_size)


def convolution(channels, outputs, stride):
    layer = nn.Conv2d(channels, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(echelon.TrainModule):
    """Three convolutions, then a linear layer."""

    def __init__(self, width: int = 32, dropout: float = 0.2, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.conv1 = convolution(1, width, stride=1)
        self.conv2 = convolution(width, 2 * width, stride=2)
        self.conv3 = convolution(2 * width, 4 * width, stride=2)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * width * 4, 10))
        self.example_input_array = torch.zeros(1, 1, 8, 8)

    def forward(self, images):
        return self.head(self.conv3(self.conv2(self.conv1(images))))

    def measure(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log(f"loss/{stage}", loss, on_step=False, on_epoch=True)
        self.log(f"accuracy/{stage}", accuracy, on_step=False, on_epoch=True, prog_bar=stage == "val")
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.measure(batch, "train")
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.measure(batch, "val")

    def test_step(self, batch, batch_idx):
        self.measure(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.01)
        schedule = OneCycleLR(optimizer, self.hparams.lr, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def draw_curves(run):
    """Draw what a run has logged, as ``curves.png`` in its folder."""
    log = EventAccumulator(str(run)).Reload()
    steps = log.Scalars("loss/val")[0].step  # per epoch
    axes = (figure := Figure(figsize=(14, 4.6), layout="constrained")).subplots(1, 3)
    for column, tag, label, color, width in (
        (0, "loss", "training, each step", "#f4cfae", 1.2),
        (0, "loss/train", "training", "#e07b39", 2.2),
        (0, "loss/val", "validation", "#2563c9", 2.2),
        (1, "accuracy/train", "training", "#e07b39", 2.2),
        (1, "accuracy/val", "validation", "#2563c9", 2.2),
        (2, "lr-AdamW", None, "#7048b6", 2.2),
    ):
        epochs, values = zip(*((event.step / steps, event.value) for event in log.Scalars(tag)), strict=True)
        axes[column].plot(epochs, values, label=label, color=color, linewidth=width, solid_capstyle="round")
    for axis, title in zip(axes, ("Loss", "Accuracy", "Learning rate"), strict=True):
        axis.set_title(title, loc="left", fontweight="bold", pad=10)
        axis.set(xlabel="epoch", xlim=(0, None))
        axis.locator_params(axis="x", integer=True)
        axis.grid(axis="y", color="#e4e7eb")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(which="both", left=False, color="#9aa5b1", labelcolor="#52606d")
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    axes[1].legend(frameon=False)
    axes[1].yaxis.set_major_formatter("{x:.0%}")
    figure.suptitle(f"Test accuracy {log.Scalars('accuracy/test')[-1].value:.1%}\n", x=0.008, ha="left", fontsize=15)
    figure.savefig(run / "curves.png", dpi=150)


def train(max_epochs=20, **settings):  # `echelon demo` calls it, too
    torch.set_num_threads(1)  # for images this small a second thread costs more than it gains
    echelon.seed_everything(1)
    callbacks = [echelon.ModelCheckpoint(monitor="accuracy/val", mode="max"), echelon.LearningRateMonitor("step")]
    trainer = echelon.Trainer(max_epochs=max_epochs, log_every_n_steps=5, callbacks=callbacks, **settings)
    trainer.fit(Digits(), datamodule=DigitsData())
    trainer.test(ckpt_path="best")
    if trainer.is_global_zero:
        draw_curves(run := Path(trainer.log_dir))
        print(f"\nCurves:       {run / 'curves.png'}")
        print(f"TensorBoard:  {sys.executable} -m tensorboard.main --logdir {run.parent}")
    return trainer


if __name__ == "__main__":
    train()
