"""A GPT whose perceptrons are mixtures of experts, dealt over processes: every layout takes the same steps.

python examples/moe.py                                             one process
python examples/moe.py --devices 2                                 everything sharded; experts are gathered
python examples/moe.py --devices 2 --ep 2                          tokens travel to the experts instead
python examples/moe.py --devices 4 --ep 2                          each half of the experts sharded over two processes
python examples/moe.py --devices 4 --ep 2 --tp 2                   attention cut in two as well
python examples/moe.py --devices 2 --ep 2 --balance 0.01           biases of the routers balance the experts
"""

import argparse

import torch
from parallel import SourceData
from torch import nn
from torch.nn import functional as F

import echelon


class Block(nn.Module):
    """Causal attention, and experts of which each token uses two."""

    def __init__(self, width, head_width, num_experts):
        super().__init__()
        self.head_width = head_width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.experts = echelon.Experts(width, 2 * width, num_experts, top_k=2, shared_hidden=width)

    def forward(self, x):
        normed = self.norm1(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.experts(self.norm2(x))


class MixtureGPT(echelon.TrainModule):
    """A decoder over bytes. Nothing in it depends on where its experts are."""

    def __init__(self, context=64, width=64, depth=2, head_width=16, num_experts=8, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width, num_experts) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
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
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--balance", type=float, default=0.0)
    parser.add_argument("--max-steps", type=int, default=10)
    options = parser.parse_args()

    echelon.seed_everything(1)
    module = MixtureGPT()
    strategy = echelon.ParallelStrategy(ep=options.ep, tp=options.tp)
    trainer = echelon.Trainer(
        strategy=strategy if options.devices > 1 else "single",
        accelerator="cpu",
        devices=options.devices,
        precision="64-true",
        max_steps=options.max_steps,
        global_batch_size=16,
        log_every_n_steps=1,
        callbacks=echelon.ExpertBalance(options.balance),
        enable_checkpointing=False,
        logger=False,
    )
    if options.devices > 1:
        print(strategy.plan(module), flush=True)
    trainer.fit(module, datamodule=SourceData())
    print(f"Loss after {trainer.global_step} steps: {trainer.callback_metrics['loss/train']:.9f}")
