"""Modules of the programs drawn at random: what they log, change and override, as a program says."""

from functools import partial

import torch
import torchmetrics
from residual import Block
from torch import nn
from torch.optim import lr_scheduler
from unusual_modules import Plain

from echelon import Loss, TrainModule

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01, weight_decay=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "asgd": partial(torch.optim.ASGD, lr=0.05, t0=2),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "ascent": partial(torch.optim.Adam, lr=0.001, maximize=True, weight_decay=0.1),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=3),
}
SCHEDULES = {
    "none": None,
    "by step": (partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), {"interval": "step"}),
    "by epoch": (partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), {}),
    "by two steps": (partial(lr_scheduler.ExponentialLR, gamma=0.7), {"interval": "step", "frequency": 2}),
    "one cycle": (
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=200, cycle_momentum=False),
        {"interval": "step"},
    ),
    "warm-up": (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            [2],
        ),
        {"interval": "step"},
    ),
    "chained": (
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, 0.3, 3), lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)]
        ),
        {"interval": "step"},
    ),
    "cycles": (
        partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.05, step_size_up=2, cycle_momentum=False),
        {"interval": "step"},
    ),
    "by a function": (partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)), {"interval": "step"}),
    "restarts": (partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2), {}),
    "plateau": (
        partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5),
        {"monitor": "reduced"},
    ),
    "plateau of validation": (
        partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5),
        {"monitor": "val", "strict": False},
    ),
}
METRICS = {
    "none": None,
    "mean": torchmetrics.MeanMetric,
    "largest": torchmetrics.MaxMetric,
    "all values": torchmetrics.CatMetric,
    "squared error": torchmetrics.MeanSquaredError,
    "rank correlation": torchmetrics.SpearmanCorrCoef,
}


def parts(batch):
    """Return the batches that are read side by side."""
    return [one for one in batch.values() if one is not None] if isinstance(batch, dict) else [batch]


class Net(Plain):
    """A small network that logs what a program says."""

    def __init__(self, program):
        if program.is_configured:
            TrainModule.__init__(self)
        else:
            super().__init__()
        self.program, self.rates, self.steps_trained = program, [], 0
        make_metric = METRICS[program.metric]
        self.metrics = nn.ModuleDict(
            {} if make_metric is None else {task: make_metric() for task in ("fit", "validate")}
        )
        if program.has_state:
            self.register_buffer("scale", torch.ones(1))
        if not program.is_configured:
            self.tie()

    def configure_model(self):
        if self.program.is_configured and not hasattr(self, "head"):
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.tie()

    def tie(self):
        """Share the weights of two layers, if the program does."""
        if self.program.is_tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def output(self, batch):
        return self.head(self.hidden(batch[0], 0))

    def errors(self, batch):
        return self.errors_of(self.output(batch), batch)

    def errors_of(self, output, batch):
        return (output - batch[1]).square().mean((1, 2))

    def mean_over_targets(self, output, batch):
        """Return the loss of predicting the signs of some targets, of which samples have different numbers."""
        signs = (batch[1].squeeze(2) > 0).long()
        counts = torch.arange(4) >= torch.tensor([3, 0, 1])[batch[2]].unsqueeze(1)
        return nn.functional.cross_entropy(
            torch.cat([output, -output], 2).flatten(0, 1), signs.where(counts.to(signs.device), -100).flatten()
        )

    def observe(self, name, errors, batch, dataloader_idx=0):
        """Log a metric object of a batch of the first loader."""
        if self.program.metric == "none" or dataloader_idx:
            return
        metric = self.metrics[name]
        has_two = self.program.metric in ("squared error", "rank correlation")
        metric(*(errors.detach(), batch[1].mean((1, 2))) if has_two else (errors.detach(),))
        if self.program.metric != "all values":
            self.log(f"{name} metric", metric, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def log_all_values(self, name):
        """Log what a metric has kept of an epoch, and let it begin anew."""
        if self.program.metric == "all values":
            self.log(f"{name} metric", self.metrics[name].compute().square().sum())
            self.metrics[name].reset()

    def log_errors(self, errors):
        """Log a batch's errors in the ways of the program."""
        self.log("loss", errors.mean(), **self.program.log_how)
        reduced = getattr(errors.detach(), self.program.reduce_fx)()
        self.log("reduced", reduced, on_step=False, on_epoch=True, reduce_fx=self.program.reduce_fx)

    def training_step(self, batch, batch_idx):
        first, *others = parts(batch)
        output, units = self.output(first), first[2]
        errors = self.errors_of(output, first)
        self.observe("fit", errors, first)
        self.log_errors(errors)
        factor = self.scale.squeeze() / (1 + 0.1 * self.steps_trained) if self.program.has_state else 1.0
        if self.program.units:
            loss = Loss((errors * units).sum() * factor, units.sum())
        elif self.program.classes:
            loss = self.mean_over_targets(output, first)  # one that is multiplied counts samples
        else:
            loss = errors.mean() * factor + sum(0.5 * self.errors(other).mean() for other in others)
        return {"loss": loss, "largest": errors.detach().max()} if self.program.returns_dict else loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        errors = self.errors(batch)
        self.observe("validate", errors, batch, dataloader_idx)
        self.log("val", errors.mean(), add_dataloader_idx=dataloader_idx > 0)
        self.log_dict({"val_max": errors.max(), "val_max_again": errors.max()}, reduce_fx="max")

    def test_step(self, batch, batch_idx):
        self.log("test", self.errors(batch).sum(), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.errors(batch)

    def on_train_epoch_end(self):
        self.log("number", float(self.current_epoch))
        self.log_all_values("fit")
        if self.program.has_state:
            self.scale.mul_(0.8)
        if self.current_epoch == self.program.last_epoch:
            self.trainer.should_stop = True

    def on_train_end(self):
        self.log("trained", float(self.steps_trained))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["steps_trained"] = self.steps_trained

    def on_load_checkpoint(self, checkpoint):
        self.steps_trained = checkpoint["steps_trained"]

    def on_validation_epoch_end(self):
        self.log_all_values("validate")

    def on_train_step_end(self):
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        step = self.trainer.global_step
        self.rates.extend(((step, f"lr {number}"), group["lr"]) for number, group in enumerate(groups))

    def configure_optimizers(self):
        head = {id(parameter) for parameter in self.head.parameters()}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        rest = [parameter for parameter in trained if id(parameter) not in head]
        groups = [{"params": [*self.head.parameters()], "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]
        has_groups = self.program.num_groups == 2 and self.program.optimizer != "lbfgs"
        optimizer = OPTIMIZERS[self.program.optimizer](groups if has_groups else trained)
        if self.program.schedule == "none":
            return optimizer
        make, settings = SCHEDULES[self.program.schedule]
        second = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [{"scheduler": make(optimizer), **settings}, *[second] * self.program.has_two_schedules]


class OwnStep:
    """Steps with the closure itself."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class OwnClipping:
    """Clips whatever the trainer is told."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


class OwnZeroing:
    """Keeps gradients of zero."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class OwnScheduling:
    """Steps each schedule twice."""

    def lr_scheduler_step(self, scheduler, metric):
        super().lr_scheduler_step(scheduler, metric)
        super().lr_scheduler_step(scheduler, metric)


class OwnGradients:
    """Halves some gradients before the update."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.embed.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class OwnBackwardEnd:
    """Drops some gradients behind each backward."""

    def on_after_backward(self):
        if self.embed.bias.grad is not None:
            self.embed.bias.grad.zero_()


class OwnDecay:
    """Sets a weight decay for each step, and another rate for the first ones."""

    def on_train_batch_start(self, batch, batch_idx):
        step = self.trainer.global_step
        for group in self.trainer.optimizers[0].param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.01 * (1 + step % 3)
            if step < 2:
                group["lr"] = 0.02 * (step + 1)


class OwnTransfer:
    """Changes batches on their way to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if isinstance(batch, dict):
            return {name: one and self.on_before_batch_transfer(one, dataloader_idx) for name, one in batch.items()}
        return [batch[0] * 0.5, *batch[1:]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if isinstance(batch, dict):
            return {name: one and self.on_after_batch_transfer(one, dataloader_idx) for name, one in batch.items()}
        return [batch[0], batch[1] + 0.1, *batch[2:]]


class OwnBatchEnd:
    """Logs what the step returned, at the end of its batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        largest = outputs["largest"] if self.program.returns_dict else parts(batch)[0][1].max()
        self.log("largest", largest, on_step=False, on_epoch=True, reduce_fx="max")


OWN = {
    "optimizer_step": OwnStep,
    "configure_gradient_clipping": OwnClipping,
    "optimizer_zero_grad": OwnZeroing,
    "lr_scheduler_step": OwnScheduling,
    "on_before_optimizer_step": OwnGradients,
    "on_after_backward": OwnBackwardEnd,
    "on_train_batch_start": OwnDecay,
    "on_after_batch_transfer": OwnTransfer,
    "on_train_batch_end": OwnBatchEnd,
}
"""What a module overrides, by a method of it."""


class ManualNet(Net):
    """Updates its head in each step, and the rest in each second one, with two optimizers."""

    def __init__(self, program):
        super().__init__(program)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        head, rest = self.optimizers()
        with self.toggled_optimizer(head):
            errors = self.errors(batch)
            self.update(head, errors)
        self.observe("fit", errors, batch)
        self.log_errors(errors)
        if batch_idx % 2:
            self.update(rest, self.errors(batch))
        return {"largest": errors.detach().max()}

    def update(self, optimizer, errors):
        optimizer.zero_grad()
        self.manual_backward(errors.mean())
        if self.program.clip:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        kind = "sgd" if self.program.optimizer == "lbfgs" else self.program.optimizer  # which needs a closure
        head = OPTIMIZERS[kind]([*self.head.parameters()])
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        rest = torch.optim.AdamW([one for name, one in trained.items() if not name.startswith("head.")], lr=0.01)
        return [head, rest], [lr_scheduler.ExponentialLR(one, 0.8) for one in (head, rest)]


def module_of(program):
    """Return the module of a program, with the methods that it overrides."""
    base = ManualNet if program.is_manual else Net
    return type("Drawn", (*(OWN[name] for name in program.overrides), base), {})(program)
