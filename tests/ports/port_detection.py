"""A detector as in torchvision's references: a list of images, a list of dicts as targets, a dict of losses."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH, LR = 2, 4, 0.005


class Rectangles(Dataset):
    """Bright rectangles on noise; images differ in size."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width = 48 + 8 * (index % 2), 56
        image = 0.1 * torch.rand(3, height, width, generator=generator)
        corner = torch.randint(0, 24, (1 + index % 2, 2), generator=generator)
        boxes = torch.cat([corner, corner + 16], dim=1)
        for x0, y0, x1, y1 in boxes.tolist():
            image[:, y0:y1, x0:x1] += 0.8
        return image, {"boxes": boxes.float(), "labels": torch.ones(len(boxes), dtype=torch.int64), "image_id": index}


def collate(samples):
    return tuple(zip(*samples, strict=True))


def build():
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
    backbone.out_channels = 16
    anchors = AnchorGenerator(sizes=((12, 16, 24),), aspect_ratios=((1.0,),))
    return RetinaNet(backbone, num_classes=2, anchor_generator=anchors, min_size=48, max_size=64)


def original():
    torch.manual_seed(1)
    model = build()
    loader = DataLoader(Rectangles(), BATCH, collate_fn=collate)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        for images, targets in loader:
            images = [image.to("cpu") for image in images]
            targets = [{k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
            loss_dict = model(images, targets)
            loss = sum(loss for loss in loss_dict.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm_up.step()
            losses.append(loss.item())
    return losses, model


class Detector(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss_dict = self.model(images, targets)
        loss = sum(loss for loss in loss_dict.values())
        self.log_dict(loss_dict)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR, momentum=0.9)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def ported(**settings):
    seed_everything(1)
    module = Detector()
    loader = DataLoader(Rectangles(), BATCH, collate_fn=collate)
    Trainer(max_epochs=EPOCHS, global_batch_size=BATCH, **settings).fit(module, loader)
    return module.model
