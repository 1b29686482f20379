"""Remote calls: a model whose two halves live on servers and are trained with torch's distributed autograd."""

import torch
from torch import nn
from torch.distributed import autograd
from torch.utils.data import DataLoader, TensorDataset

import echelon


class Half(nn.Module):
    """A part of the model with its own optimizer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        torch.manual_seed(inputs)
        self.net = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x):
        return self.net(x)

    def update(self, context):
        # the gradients that backward has left in this context of distributed autograd
        for parameter, gradient in autograd.get_gradients(context).items():  # type: ignore[attr-defined]
            parameter.grad = gradient
        self.optimizer.step()


def call(reference, method, *args):
    """Call a method of an object, in the process that holds it."""
    return getattr(reference.local_value(), method)(*args)


class TwoHalves(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 1)

    def on_fit_start(self):
        sizes = {"server0": (4, 32), "server1": (32, 16)}
        self.halves = {server: self.trainer.strategy.remote(server, Half, size) for server, size in sizes.items()}

    def ask(self, server, *request):
        return self.trainer.strategy.rpc_sync(server, call, (self.halves[server], *request))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.context = autograd.context()
        self.context_id = self.context.__enter__()  # exited once backward is done, after this method
        for server in self.halves:
            x = self.ask(server, "forward", x)
        loss = nn.functional.mse_loss(self.head(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def backward(self, loss):
        autograd.backward(self.context_id, [loss])  # type: ignore[attr-defined]
        for parameter, gradient in autograd.get_gradients(self.context_id).items():  # type: ignore[attr-defined]
            parameter.grad = gradient  # the head's
        for server in self.halves:
            self.ask(server, "update", self.context_id)
        self.context.__exit__(None, None, None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    echelon.seed_everything(0)
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), 32, shuffle=True)
    servers = echelon.ParameterServerStrategy(servers=2)
    trainer = echelon.Trainer(strategy=servers, accelerator="cpu", devices=1, max_epochs=20, logger=False)
    trainer.fit(TwoHalves(), loader)
    print(f"{trainer.global_step} steps: loss {trainer.callback_metrics['loss']:.4f}")
