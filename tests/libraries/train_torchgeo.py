"""torchgeo: its segmentation and classification tasks, with its data modules' transfer of batches."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self, is_mask):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(12, 3, 32, 32, generator=generator)
        self.targets = torch.randint(0, 2, (12, 32, 32) if is_mask else (12,), generator=generator)
        self.key = "mask" if is_mask else "label"

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], self.key: self.targets[index]}


def run(settings):
    from lightning.pytorch import Trainer
    from torchgeo.trainers import ClassificationTask, SemanticSegmentationTask

    observed = {}
    tasks = {
        "segmentation": SemanticSegmentationTask(model="unet", backbone="resnet18", in_channels=3, num_classes=2),
        "classification": ClassificationTask(model="resnet18", in_channels=3, num_classes=2),
    }
    for name, task in tasks.items():
        loader = DataLoader(Scenes(name == "segmentation"), batch_size=4)
        trainer = Trainer(**settings)
        trainer.fit(task, loader, loader)
        observed[f"{name} loss"] = float(trainer.callback_metrics["val_loss"])
        observed[f"{name} test"] = trainer.test(task, loader, verbose=False)[0]["test_loss"]
        observed[f"{name} predictions"] = len(trainer.predict(task, loader))
        trainer.save_checkpoint(f"{name}.ckpt")
        assert Path(f"{name}.ckpt").exists()
        restored = type(task).load_from_checkpoint(f"{name}.ckpt")
        assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), task.parameters(), strict=True))
    return observed
