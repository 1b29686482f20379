"""A GPT whose layers and sequences are split over processes: every layout takes the same steps to the same loss.

python examples/parallel.py                                        one process
python examples/parallel.py --devices 2 --tp 2                     layers split in two
python examples/parallel.py --devices 2 --tp 2 --sequence          also norms and residuals, along the sequence
python examples/parallel.py --devices 2 --cp 2                     sequences split in two
python examples/parallel.py --devices 2 --pp 2                     blocks in two pipeline stages
python examples/parallel.py --devices 4 --pp 2 --tp 2              also the layers of each stage split in two
python examples/parallel.py --devices 4 --tp 2                     layers split in two, in each of two shards
python examples/parallel.py --devices 4 --tp 2 --replicate 2       layers split in two, in each of two replicas
python examples/parallel.py --devices 8 --tp 2 --cp 2              two shards, with sequences and layers split in two
"""

import argparse
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
    """The modules of the standard library, in alphabetical order."""

    def __init__(self, context: int = 64, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.train = Windows(text, self.hparams.context)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)


class Block(nn.Module):
    """Causal attention and a perceptron. The head width is fixed, not the number of heads: a rank may have a part."""

    def __init__(self, width, head_width):
        super().__init__()
        self.head_width = head_width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # these names are recognized; for others give ParallelStrategy(tp_plan={"blocks.*.name": "colwise", ...})
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm1(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class GPT(echelon.TrainModule):
    """A decoder over bytes. Nothing in it depends on the layout except `positions`, as a rank may have only some."""

    def __init__(self, context: int = 64, width: int = 64, depth: int = 2, head_width: int = 16, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(self.trainer.strategy.positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        total = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = echelon.Loss(total, count=targets.numel())
        self.log("loss/train", loss.mean, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--max-steps", type=int, default=10)
    options = parser.parse_args()

    echelon.seed_everything(1)
    module = GPT()
    strategy = echelon.ParallelStrategy(
        pp=options.pp,
        dp_replicate=options.replicate,
        cp=options.cp,
        tp=options.tp,
        sequence_parallel=options.sequence,
    )
    trainer = echelon.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        precision="64-true",
        max_steps=options.max_steps,
        global_batch_size=16,
        log_every_n_steps=1,
        enable_checkpointing=False,
        logger=False,
    )
    print(strategy.plan(module), flush=True)
    trainer.fit(module, datamodule=SourceData())
    print(f"Loss after {trainer.global_step} steps: {trainer.callback_metrics['loss/train']:.9f}")
