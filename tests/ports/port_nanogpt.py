"""A loop in the manner of nanoGPT: random windows, gradient accumulation, clipping, a rate that is set by hand."""

import math
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from echelon import Trainer, TrainModule, seed_everything

ITERS, ACCUMULATE, BATCH, BLOCK, VOCAB, WIDTH = 6, 4, 4, 8, 20, 16
MAX_LR, MIN_LR, WARMUP = 1e-2, 1e-3, 2
DATA = (torch.arange(400) ** 2 // 7) % VOCAB


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        decay, no_decay = [p for p in self.parameters() if p.dim() > 1], [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=MAX_LR, betas=(0.9, 0.95))


def get_batch(generator):
    ix = torch.randint(len(DATA) - BLOCK, (BATCH,), generator=generator)
    return torch.stack([DATA[i : i + BLOCK] for i in ix]), torch.stack([DATA[i + 1 : i + 1 + BLOCK] for i in ix])


def get_lr(it):
    if it < WARMUP:
        return MAX_LR * (it + 1) / (WARMUP + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - WARMUP) / (ITERS - WARMUP)))
    return MIN_LR + coeff * (MAX_LR - MIN_LR)


def original():
    torch.manual_seed(1337)
    model = GPT()
    optimizer = model.configure_optimizers()
    generator = torch.Generator().manual_seed(1338)
    losses = []
    for iter_num in range(ITERS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        step_losses = []
        for _micro_step in range(ACCUMULATE):
            _, loss = model(*get_batch(generator))
            (loss / ACCUMULATE).backward()
            step_losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(sum(step_losses) / ACCUMULATE)
    return losses, model


class Windows(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(1338)
        return islice(iter(lambda: get_batch(generator), None), self.rank, None, self.world_size)


class NanoGPT(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def train_dataloader(self):
        strategy = self.trainer.strategy
        return torch.utils.data.DataLoader(Windows(strategy.data_rank, strategy.data_size), batch_size=None)

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = get_lr(self.global_step)

    def training_step(self, batch, batch_idx):
        _, loss = self.model(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.model.configure_optimizers()


def ported(world_size=1, **settings):
    seed_everything(1337)
    module = NanoGPT()
    accumulate = ACCUMULATE // world_size
    Trainer(max_steps=ITERS, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, **settings).fit(module)
    return module.model
