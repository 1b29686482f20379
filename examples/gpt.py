"""A small GPT that reads the source of Python's own standard library, byte by byte, and then writes some.

It reads in paragraphs, of which several share a sequence (docs/sequences.md): padding each to 256 bytes would make half
of every batch padding.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import echelon


class SourceData(echelon.DataModule):
    """The paragraphs of the standard library, packed; those of each tenth module are for validation."""

    def __init__(self, context: int = 256, batch_size: int = 12):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.val = self.packed(files[::10])
        self.train = self.packed(file for number, file in enumerate(files) if number % 10)

    def packed(self, files):
        paragraphs = [part for file in files for part in file.read_bytes().split(b"\n\n") if part.strip()]
        documents = [torch.frombuffer(bytearray(part + b"\n"), dtype=torch.uint8) for part in paragraphs]
        return echelon.PackedDataset(documents, self.hparams.context, lengths=[len(each) for each in documents])

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=echelon.PackedDataset.collate)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size, collate_fn=echelon.PackedDataset.collate)


class Block(nn.Module):
    """Self-attention, then a two-layer perceptron, each with its input normalized and a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(echelon.TrainModule):
    """A decoder over bytes, trained with learning rate warm-up and cosine decay."""

    def __init__(self, context: int = 256, width: int = 96, depth: int = 3, heads: int = 3, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        nn.init.normal_(self.token.weight, std=0.02)  # also the last layer: the first loss should be ln 256
        nn.init.zeros_(self.position.weight)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.example_input_array = torch.zeros(1, context, dtype=torch.long)

    def forward(self, tokens, positions=None, documents=None):
        """Return logits; by default, each sequence is one document."""
        mask = None if documents is None else echelon.document_mask(documents)
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.token.weight)

    def loss(self, batch):
        logits = self(batch["input_ids"], batch["position_ids"], batch["document_ids"])
        targets = batch["shift_labels"].flatten()  # -100, which is no target, where the next byte is another document's
        total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return echelon.Loss(total, count=(targets != -100).sum())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss/train", loss.mean, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss/val", loss.mean, prog_bar=True, batch_size=int(loss.count))

    def configure_optimizers(self):
        decayed = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95), fused=True)
        steps = self.trainer.estimated_stepping_batches
        warmup = steps // 10

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_callbacks(self):
        return [echelon.ThroughputMonitor(length_fn=self.tokens_of), echelon.LearningRateMonitor()]

    @torch.no_grad()
    def write(self, prompt, length, temperature=0.8):
        """Continue a text by `length` bytes."""
        self.eval()
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.hparams.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=1000)

    echelon.seed_everything(1)
    module = GPT()
    trainer = echelon.Trainer(
        max_steps=parser.parse_args().max_steps,
        gradient_clip_val=1.0,
        val_check_interval=100,
        limit_val_batches=10,
        log_every_n_steps=10,
    )
    trainer.fit(module, datamodule=SourceData())
    print(module.write("    def ", length=400))
