"""lightly: SimCLR from its examples, and its linear evaluation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run(settings):
    import pytorch_lightning as pl
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.utils.benchmarking import LinearClassifier, MetricCallback

    class SimCLR(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
            self.projection_head = SimCLRProjectionHead(8, 16, 8)
            self.criterion = NTXentLoss()

        def forward(self, x):
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch, batch_idx):
            views, _ = batch
            loss = self.criterion(self(views), self(views + 0.1 * views.sin()))
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.06)

    images, labels = torch.rand(24, 3, 16, 16), torch.arange(24) % 3
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    trainer = pl.Trainer(**settings)
    model = SimCLR()
    trainer.fit(model, loader)

    class Flat(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, x):
            return self.backbone(x).flatten(start_dim=1)

    metrics = MetricCallback()
    classifier = LinearClassifier(Flat(model.backbone), 8, feature_dim=8, num_classes=3, topk=(1, 2))
    linear = pl.Trainer(**{**settings, "callbacks": [metrics]})
    linear.fit(
        classifier,
        DataLoader([(*pair, "name") for pair in zip(images, labels, strict=True)], batch_size=8),
        DataLoader([(*pair, "name") for pair in zip(images, labels, strict=True)], batch_size=8),
    )
    assert len(metrics.val_metrics["val_top1"]) == settings["max_epochs"]
    return {"loss": float(trainer.callback_metrics["train_loss"]), "top1": float(max(metrics.val_metrics["val_top1"]))}
