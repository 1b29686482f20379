"""ImageNet: a torchvision model trained as in PyTorch's own example, on folders of images or on fake ones.

    python examples/imagenet.py --epochs 1 --size 64                     fake images, to see that it runs
    python examples/imagenet.py --data imagenet --workers 8              on all GPUs of this machine
    python examples/imagenet.py --data imagenet --resume last            resume from the newest checkpoint
    python examples/imagenet.py --data imagenet --resume best.ckpt --evaluate
    srun python examples/imagenet.py --data imagenet --batch-size 1024 --lr 0.4 --precision bf16-mixed --compile

The folder contains `train` and `val`, each with a folder of images for every class.
"""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData, ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

import echelon


class ImageNetData(echelon.DataModule):
    """Training images, randomly cropped and flipped, and validation images, cropped at the center."""

    def __init__(self, folder: str | None = None, batch_size: int = 256, workers: int = 4, size: int = 224):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        folder, size = self.hparams.folder, self.hparams.size
        end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        end.append(v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        shaken = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *end])
        plain = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size), *end])
        if folder is None:
            self.train = FakeData(1280, (3, size, size), 1000, shaken)
            self.val = FakeData(320, (3, size, size), 1000, plain, random_offset=1280)
        else:
            self.train, self.val = ImageFolder(f"{folder}/train", shaken), ImageFolder(f"{folder}/val", plain)

    def loader(self, dataset, shuffle):
        batch_size, workers = self.hparams.batch_size, self.hparams.workers
        keeps = {"pin_memory": torch.cuda.is_available(), "persistent_workers": workers > 0}
        return DataLoader(dataset, batch_size, shuffle, num_workers=workers, **keeps)

    def train_dataloader(self):
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.val, shuffle=False)


class Classifier(echelon.TrainModule):
    """Trained with SGD; the learning rate falls to a tenth every 30 epochs, or along a cosine."""

    def __init__(
        self,
        arch: str = "resnet18",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        schedule: str = "step",
    ):
        super().__init__()
        self.save_hyperparameters()
        # convolutions run faster if the channels of a pixel are adjacent in memory
        self.model = get_model(arch, num_classes=1000).to(memory_format=torch.channels_last)

    def forward(self, images):
        return self.model(images.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch, batch_idx):
        return self.measure(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.measure(batch, "val")

    def measure(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        hits = logits.topk(5).indices == labels[:, None]  # at most one in each row
        self.log(f"loss/{stage}", loss, prog_bar=stage == "train")
        self.log(f"top1/{stage}", hits[:, 0].float().mean(), prog_bar=True)
        self.log(f"top5/{stage}", hits.any(1).float().mean(), prog_bar=stage == "val")
        return loss

    def configure_optimizers(self):
        settings = self.hparams
        optimizer = torch.optim.SGD(
            self.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        if settings.schedule == "cosine":
            return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]
        return [optimizer], [StepLR(optimizer, step_size=30)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the images; made-up ones if it is left out")
    parser.add_argument("--arch", default="resnet18", help="any name that torchvision.models.list_models() gives")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="of a step, over all devices of all nodes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--schedule", choices=("step", "cosine"), default="step")
    parser.add_argument("--log-every", type=int, default=50, help="steps from one that is logged to the next")
    parser.add_argument("--workers", type=int, default=4, help="processes that load images, for each device")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--resume", metavar="CKPT", help="a checkpoint to go on from, or 'last'")
    parser.add_argument("--evaluate", action="store_true", help="validate the checkpoint, and do not train")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    echelon.seed_everything(options.seed)
    module = Classifier(options.arch, options.lr, options.momentum, options.weight_decay, options.schedule)
    data = ImageNetData(options.data, options.batch_size, options.workers, options.size)
    trainer = echelon.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        compile=options.compile,
        max_epochs=options.epochs,
        global_batch_size=options.batch_size,
        log_every_n_steps=options.log_every,
        callbacks=[echelon.ModelCheckpoint(monitor="top1/val", mode="max", save_last=True)],
    )
    if options.evaluate:
        trainer.validate(module, datamodule=data, ckpt_path=options.resume)
    else:
        trainer.fit(module, datamodule=data, ckpt_path=options.resume)
