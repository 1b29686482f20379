"""A vision transformer that knows the digits 0 to 4 learns 5 to 9: first a new head, later the backbone.

Without arguments it first trains a small ViT, which becomes the folder `classify/base`. With ``--base`` it takes a
folder that you have, of images with one channel. Either way, what follows is what one does with a folder from the hub:
load it without its head, train the new head on features that do not change, then train all of it at a lower rate.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForImageClassification

import echelon

BASE = AutoConfig.for_model(
    "vit", image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=128, num_labels=5,
)  # fmt: skip


def images_of(digits):
    """Return the images of scikit-learn that show some digits, with their labels counted from 0: most, and the rest."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) / 16 - 0.3) / 0.38
    chosen = torch.isin(labels, torch.tensor(digits)).nonzero().flatten()
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    all_of_them = TensorDataset(images[chosen], labels[chosen] - digits[0])
    return torch.utils.data.random_split(all_of_them, [0.7, 0.3], torch.Generator().manual_seed(0))


class Classifier(echelon.TrainModule):
    """A model of transformers for images, which computes its loss itself."""

    def __init__(self, folder=None, lr=3e-3):
        super().__init__()
        self.lr = lr
        self.model: Any = AutoModelForImageClassification.from_config(BASE)
        if folder is not None:
            config = AutoConfig.from_pretrained(folder, num_labels=5)
            model = AutoModelForImageClassification.from_config(config)
            self.model = echelon.load_pretrained(model, folder, ignore=["classifier"])  # the head stays as it is drawn

    @property
    def backbone(self):
        """What `BackboneFinetuning` freezes, and unfreezes later."""
        return self.model.base_model

    def training_step(self, batch):
        images, labels = batch
        return self.model(pixel_values=images, labels=labels).loss

    def validation_step(self, batch):
        images, labels = batch
        accuracy = (self.model(pixel_values=images).logits.argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


class Accuracies(echelon.Callback):
    """Keeps the accuracy on unseen images after each epoch."""

    def __init__(self):
        self.values = []

    def on_validation_epoch_end(self, trainer, module):
        self.values.append(float(trainer.callback_metrics["accuracy"]))

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a folder with a model that classifies images of one channel")
    parser.add_argument("--out", type=Path, default=Path("classify"))
    parser.add_argument("--base-epochs", type=int, default=15)
    parser.add_argument("--head-epochs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    echelon.seed_everything(1)

    def fit(module, digits, max_epochs, *callbacks):
        seen, unseen = images_of(digits)
        trainer = echelon.Trainer(
            strategy=options.strategy, devices=options.devices, max_epochs=max_epochs, callbacks=list(callbacks),
            num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(seen, 32, shuffle=True), DataLoader(unseen, 32))

    folder = options.base
    if folder is None:
        saves = echelon.HuggingFaceCheckpoint(options.out / "base")
        fit(Classifier(), [0, 1, 2, 3, 4], options.base_epochs, saves)
        folder = Path(saves.last_path)

    accuracies, saves = Accuracies(), echelon.HuggingFaceCheckpoint(options.out / "tuned")
    thaws = echelon.BackboneFinetuning(options.head_epochs, backbone_initial_ratio_lr=0.1)
    fit(Classifier(folder), [5, 6, 7, 8, 9], options.epochs, thaws, accuracies, saves)
    head, both = accuracies.values[options.head_epochs - 1], accuracies.values[-1]
    print(f"Accuracy on unseen images: {head:.1%} with a new head, {both:.1%} with the backbone trained as well")

    model = AutoModelForImageClassification.from_pretrained(saves.last_path).eval()
    images, labels = zip(*images_of([5, 6, 7, 8, 9])[1], strict=True)
    with torch.no_grad():
        found = model(pixel_values=torch.stack(images)).logits.argmax(1)
    print(f"Accuracy of {saves.last_path}, as read back: {(found == torch.stack(labels)).float().mean():.1%}")


if __name__ == "__main__":
    main()
