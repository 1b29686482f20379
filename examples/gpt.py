"""A small GPT that reads the source of Python's own standard library, byte by byte, and then writes some."""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import echelon


class Windows(Dataset):
    """A text split into windows of `context` bytes; the target of each is the window one byte further on."""

    def __init__(self, text, context):
        self.text, self.context = text, context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


class SourceData(echelon.DataModule):
    """The modules of the standard library, in alphabetical order; the last tenth of the text is for validation."""

    def __init__(self, context: int = 96, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        split = len(text) * 9 // 10
        self.train = Windows(text[:split], self.hparams.context)
        self.val = Windows(text[split:], self.hparams.context)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with its input normalized and a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(echelon.TrainModule):
    """A decoder over bytes, trained with learning rate warm-up and cosine decay."""

    def __init__(self, context: int = 96, width: int = 96, depth: int = 3, heads: int = 3, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(256, width)
        nn.init.normal_(self.token.weight, std=0.02)  # also the last layer: the first loss should be ln 256
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.example_input_array = torch.zeros(1, context, dtype=torch.long)

    def forward(self, tokens):
        x = self.blocks(self.token(tokens) + self.position[: tokens.shape[1]])
        return F.linear(self.norm(x), self.token.weight)

    def loss(self, batch):
        tokens, targets = batch
        total = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return echelon.Loss(total, count=targets.numel())

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
        return [echelon.ThroughputMonitor(length_fn=lambda batch: batch[0].numel()), echelon.LearningRateMonitor()]

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
    print(module.write("\ndef ", length=400))
