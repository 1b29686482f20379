"""pina: a network that is trained on data, by pina's own trainer, and read from its checkpoint."""

from typing import ClassVar

import torch


def run(settings):
    from pina import Condition, LabelTensor, Trainer
    from pina.model import FeedForward
    from pina.problem import AbstractProblem
    from pina.solver import SupervisedSolver

    x = torch.linspace(0, 1, 16)[:, None]

    class Sine(AbstractProblem):
        input_variables: ClassVar = ["x"]
        output_variables: ClassVar = ["u"]
        conditions: ClassVar = {"data": Condition(input=LabelTensor(x, ["x"]), target=LabelTensor(torch.sin(x), ["u"]))}

    solver = SupervisedSolver(Sine(), FeedForward(1, 1, layers=[8]), use_lt=True)
    trainer = Trainer(solver, **settings, batch_size=None, train_size=1.0)
    trainer.train()
    trainer.save_checkpoint("solver.ckpt")
    restored = SupervisedSolver.load_from_checkpoint("solver.ckpt", problem=Sine(), model=FeedForward(1, 1, layers=[8]))
    points = LabelTensor(x, ["x"])
    torch.testing.assert_close(restored(points).tensor, solver(points).tensor)
    return {"loss": float(trainer.callback_metrics["train_loss"]), "mean": float(solver(points).mean())}
