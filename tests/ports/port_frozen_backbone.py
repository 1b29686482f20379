"""A vision classifier in the manner of torchvision's references: frozen batch norms below, trained ones above."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import Conv2dNormActivation

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH = 3, 8


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(Conv2dNormActivation(3, 8, stride=2), Conv2dNormActivation(8, 8))
        self.head = nn.Sequential(Conv2dNormActivation(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


def split(samples, seed):
    images = torch.rand(samples, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, images[:, 0, :3].mean(dim=2).argmax(dim=1))


def make_optimizer(model):
    norms = [p for m in model.head.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.head.parameters() if not any(p is norm for norm in norms)]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)


def original(ranks=1):
    """Train; with several ranks, trained batch norms see the samples of one rank at a time, as under torch's DDP."""
    torch.manual_seed(12)
    model = Classifier()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer, scheduler = make_optimizer(model)
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        model.backbone.eval()
        for images, targets in DataLoader(split(32, 13), BATCH):
            optimizer.zero_grad()
            parts = zip(images.chunk(ranks), targets.chunk(ranks), strict=True)
            loss = sum(criterion(model(x), y) for x, y in parts) / ranks
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        with torch.inference_mode():
            for images, _targets in DataLoader(split(8, 14), BATCH):
                model(images)
    return losses, model


class FrozenBackbone(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier()
        self.model.backbone.eval()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = self.criterion(self.model(images), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.log("accuracy", (self.model(images).argmax(dim=1) == targets).float().mean())

    def configure_optimizers(self):
        optimizer, scheduler = make_optimizer(self.model)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def ported(**settings):
    seed_everything(12)
    module = FrozenBackbone()
    train, val = DataLoader(split(32, 13), BATCH), DataLoader(split(8, 14), BATCH)
    Trainer(max_epochs=EPOCHS, global_batch_size=BATCH, **settings).fit(module, train, val)
    return module.model
