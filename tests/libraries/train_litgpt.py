"""litgpt: its own script for pretraining, over Fabric, a resume from its checkpoint, and its reader of files."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader


def run(settings):
    from litgpt import GPT, Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from litgpt.utils import lazy_load

    class Loader(DataLoader):
        """A loader that a checkpoint can hold."""

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class Counting(DataModule):
        def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
            self.batch_size = batch_size

        def train_dataloader(self):
            tokens = torch.arange(9).repeat(16, 1) + torch.arange(16)[:, None]
            return Loader(tokens % 32, batch_size=self.batch_size)

        def val_dataloader(self):
            return self.train_dataloader()

    sizes = {"block_size": 8, "vocab_size": 32, "padded_vocab_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 8}
    config = Config(name="tiny", intermediate_size=16, **sizes)
    sys.argv = ["litgpt", "pretrain", "tiny"]  # which the script parses again, to save its arguments

    def train(tokens, **options):
        steps = {"global_batch_size": 4, "micro_batch_size": 2, "max_tokens": tokens, "max_norm": 1.0}
        setup(
            model_name="tiny",
            model_config=config,
            precision="32-true",
            data=Counting(),
            train=TrainArgs(**steps, save_interval=4, lr_warmup_steps=1),
            eval=EvalArgs(interval=100, max_iters=2, initial_validation=False, final_validation=False),
            devices=1,
            logger_name="csv",
            seed=1,
            **options,
        )

    def read(folder):
        model = GPT(config)
        model.load_state_dict(lazy_load(f"{folder}/lit_model.pth")["model"])
        with torch.no_grad():
            return float(model(torch.arange(8)[None]).square().mean())

    train(8 * 16, out_dir=Path("run"))
    train(8 * 32, out_dir=Path("again"), resume=Path("run/step-00000004/lit_model.pth"))
    return {"mean": read("run/final"), "resumed": read("again/final")}
