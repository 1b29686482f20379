"""A short run under tensor parallelism, clipped, from a checkpoint and to one, whose parameters are compared."""

import torch
from as_rank import double_trainer
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, seed_everything


def fit_words(make_module, num_words, *, path=None, ckpt_path=None, epochs=2, **degrees):
    """Train on random words, on one process without degrees; return trainer, module, data, and whole parameters."""
    seed_everything(1, verbose=False)
    module = make_module()
    settings = {"strategy": ParallelStrategy(**degrees)} if degrees else {}
    trainer = double_trainer(max_epochs=epochs, gradient_clip_val=0.1, global_batch_size=8, **settings)
    torch.manual_seed(3)
    data = TensorDataset(torch.randint(0, num_words, (16, 8)))
    loader = DataLoader(data, 8 // degrees.get("pp", 1) // degrees.get("dp_shard", 1))
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    state = trainer.strategy.full_model_state() if degrees else module.state_dict()
    return trainer, module, data, state
