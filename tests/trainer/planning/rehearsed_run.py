"""A run of several ranks that records of itself what a rehearsal reports for each rank."""

from typing import cast

import torch
import torch.distributed as dist
from as_rank import calm_down
from planned_modules import GPT, MixedGPT, ShortGPT, settings_of
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, DataModule, Trainer, seed_everything
from echelon.callbacks.sample_ledger import SampleSource
from echelon.strategies.distributed.nested import iterate_tensors
from echelon.strategies.estimate.counted_traffic import CountedTraffic
from echelon.strategies.estimate.live_memory import storages_bytes
from echelon.strategies.registry import find_strategy
from echelon.strategies.state.dtensor import local_shard
from echelon.trainer.cli.instantiate import build_targets
from echelon.trainer.planning.rehearsed_rank import held_parameters

SEED = 3
NUMBER = 11
"""Of sequences: the last global batch of 4 ranks is not full, and a second one is."""


class Tokens(DataModule):
    """Sequences of consecutive tokens."""

    def __init__(self, number: int = NUMBER):
        super().__init__()
        self.number = number

    def train_dataloader(self):
        tokens = torch.arange(self.number * GPT.context).view(-1, GPT.context) % GPT.num_tokens
        return DataLoader(TensorDataset(tokens, tokens), 1, shuffle=True)


class Noting(Callback):
    """Notes what this rank reads, holds, sends in the second step, and writes."""

    def __init__(self, path):
        self.path, self.samples, self.traffic, self.noted = path, [], CountedTraffic(), {}

    def setup(self, trainer, module, stage):
        self.trail = cast(SampleSource, trainer).follow_samples()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.samples += [index for reading in self.trail.readings() for index in reading.indices]

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
            self.traffic.__enter__()
        elif trainer.global_step == 2:
            self.traffic.__exit__(None, None, None)
            own = set(held_parameters(module.parameters()))
            states = [values for optimizer in trainer.optimizers for values in optimizer.state.values()]
            self.noted = {
                "groups": [
                    sum(local_shard(p).numel() for p in group["params"] if p in own)
                    for group in trainer.optimizers[0].param_groups
                ],
                "parameters": storages_bytes(own),
                "gradients": storages_bytes(p.grad for p in own),
                "optimizer": storages_bytes(iterate_tensors(states)),
                "sent": {ranks: sent for ranks, sent in self.traffic.sent.items() if sent > 4000},
            }


def kind_for(name):
    """Return the kind of module that is trained in a layout."""
    return MixedGPT if "ep" in name else ShortGPT


def noted_by_ranks(layouts, folder):
    """Train under each strategy, and return what this rank notes of it; collective."""
    calm_down()
    answers = {}
    for name, (given, settings) in layouts.items():
        noting = Noting(folder / name)
        seed_everything(SEED, verbose=False)
        strategy = find_strategy(build_targets(given, "strategy"))()
        trainer = Trainer(**settings_of(strategy=strategy, max_epochs=1, callbacks=[noting], **settings))
        trainer.fit(kind_for(name)(), datamodule=Tokens())
        dist.barrier()
        files = {file.name: file.stat().st_size for file in noting.path.iterdir() if file.suffix == ".safetensors"}
        answers[name] = {**noting.noted, "samples": noting.samples, "files": files}
    return answers
