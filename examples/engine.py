"""nanoGPT's training loop, kept as it is: an Engine provides processes, precision, gradients and checkpoints."""

import argparse
import math

import torch
from gpt import GPT
from parallel import SourceData
from torch.nn import functional as F

import echelon


def learning_rate(step, max_steps, highest=3e-3, warmup=20):
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, max_steps - warmup))))


def main(engine, options):
    engine.seed_everything(1)
    data = SourceData(context=96, batch_size=32)
    data.setup("fit")
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = engine.setup(model, optimizer)
    train = engine.setup_dataloaders(data.train_dataloader(), global_batch_size=64)
    state = {"model": model, "optimizer": optimizer, "train": train, "step": 0}
    if options.resume:
        engine.load(options.folder, state)

    while True:
        for tokens, targets in train:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state["step"], options.max_steps)
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            engine.backward(loss)
            if not engine.sync_gradients:
                continue
            engine.clip_gradients(optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if state["step"] % 10 == 0:
                engine.print(f"step {state['step']}: loss {engine.reduce(loss).item():.4f}")
            state["step"] += 1
            if state["step"] == options.max_steps:
                engine.save(options.folder, state)
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--folder", default="gpt.ckpt")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    echelon.Engine(strategy=arguments.strategy, devices=arguments.devices).launch(main, arguments)
