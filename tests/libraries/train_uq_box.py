"""lightning-uq-box: a regression with a variance, and an ensemble of its checkpoints."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader


def run(settings):
    from lightning_uq_box.uq_methods import DeepEnsembleRegression, MVERegression

    from lightning import Trainer

    x = torch.linspace(-1, 1, 24)[:, None]
    data = [{"input": one, "target": one.sin()} for one in x]
    loader = DataLoader(data, batch_size=8)
    members = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
        model = MVERegression(net, optimizer=functools.partial(torch.optim.Adam, lr=0.01), burnin_epochs=1)
        trainer = Trainer(**settings)
        trainer.fit(model, loader)
        trainer.save_checkpoint(f"member{seed}.ckpt")
        members.append({"base_model": model, "ckpt_path": f"member{seed}.ckpt"})
    found = DeepEnsembleRegression(members).predict_step(x)
    return {name: float(found[name].mean()) for name in ("pred", "pred_uct")}
