"""segmentation-models-pytorch and timm: the modules from their documentation."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def run(settings):
    import pytorch_lightning as pl
    import segmentation_models_pytorch as smp
    import timm
    import timm.optim

    class Segmentation(pl.LightningModule):
        def __init__(self, arch, encoder_name, **kwargs):
            super().__init__()
            self.save_hyperparameters()
            self.model = smp.create_model(arch, encoder_name=encoder_name, encoder_weights=None, **kwargs)
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.training_step_outputs = []

        def forward(self, image):
            return self.model(image)

        def training_step(self, batch, batch_idx):
            image, mask = batch
            logits = self(image)
            loss = self.loss_fn(logits, mask)
            stats = smp.metrics.get_stats((logits.sigmoid() > 0.5).long(), mask.long(), mode="binary")
            self.training_step_outputs.append(torch.stack(stats))
            return loss

        def on_train_epoch_end(self):
            stats = torch.cat(self.training_step_outputs, dim=1)
            self.log_dict({"train_iou": smp.metrics.iou_score(*stats, reduction="micro")}, prog_bar=True)
            self.training_step_outputs.clear()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = timm.create_model("resnet10t", pretrained=False, num_classes=2)

        def training_step(self, batch, batch_idx):
            image, mask = batch
            loss = torch.nn.functional.cross_entropy(self.model(image), mask.flatten(1).mean(1).gt(0.5).long())
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return timm.optim.create_optimizer_v2(self, opt="adamw", lr=1e-3)

    images = torch.rand(8, 3, 64, 64)
    loader = DataLoader(TensorDataset(images, (images.mean(1, keepdim=True) > 0.5).float()), batch_size=4)
    trainer = pl.Trainer(**settings)
    trainer.fit(Segmentation("FPN", "resnet18", in_channels=3, classes=1), loader)
    torch.manual_seed(1)
    classifying = pl.Trainer(**settings)
    classifying.fit(Classifier(), loader)
    return {
        "iou": float(trainer.callback_metrics["train_iou"]),
        "loss": float(classifying.callback_metrics["train_loss"]),
    }
