"""Programs that run with Lightning and with Echelon, given its module as `pl`; each returns what it observed."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Observed = dict[str, Any]


def frameworks() -> dict[str, Any]:
    """Return the names that programs use, by framework; Lightning only where it is installed."""
    import echelon

    own = SimpleNamespace(**{name: getattr(echelon, name) for name in echelon.__all__}, __name__="echelon")
    own.LightningModule, own.LightningDataModule = echelon.TrainModule, echelon.DataModule
    found = {"echelon": own}
    try:
        import lightning.pytorch as lightning
        from lightning.pytorch import callbacks, loggers
    except ModuleNotFoundError:
        return found
    found["lightning"] = SimpleNamespace(**{**vars(callbacks), **vars(loggers), **vars(lightning)})
    return found


def data(num_samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    x = torch.arange(float(num_samples))[:, None] / 10
    return DataLoader(TensorDataset(x.expand(-1, 2).contiguous(), x), batch_size)


def trainer(pl: Any, **settings: Any) -> Any:
    silent = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": ".",
    }
    return pl.Trainer(**{**silent, **settings})


def net(pl: Any, **methods: Any) -> Any:
    """Return a module of the framework, with these methods in addition to, or instead of, its own."""

    def __init__(self: Any) -> None:
        pl.LightningModule.__init__(self)
        self.net = nn.Linear(2, 1)
        nn.init.constant_(self.net.weight, 0.5)
        nn.init.constant_(self.net.bias, 0.1)
        self.notes: list[Any] = []

    def loss(self: Any, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    own = {
        "__init__": __init__,
        "forward": lambda self, x: self.net(x),
        "loss": loss,
        "training_step": lambda self, batch, batch_idx: self.loss(batch),
        "validation_step": lambda self, batch, batch_idx: self.log("val_loss", self.loss(batch)),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
    }
    return type("Net", (pl.LightningModule,), {**own, **methods})()


def numbers(metrics: Any) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in sorted(metrics.items())}


# --- the numbered lines of the issue --------------------------------------------------------------------------------


def around_a_fit(pl: Any) -> Observed:
    """Save, evaluate and fit again with one trainer."""
    own, module = trainer(pl), net(pl, predict_step=lambda self, batch, batch_idx: self(batch[0]))
    own.fit(module, data(), data())
    own.save_checkpoint("after.ckpt")
    seen: Observed = {"saved": Path("after.ckpt").exists(), "global_step": own.global_step}
    seen["validated"] = numbers(own.validate(module, data(), verbose=False)[0])
    seen["predicted"] = [tuple(batch.shape) for batch in own.predict(module, data())]
    own.save_checkpoint("again.ckpt")
    seen["saved again"] = Path("again.ckpt").exists()
    other = trainer(pl, max_epochs=4)
    other.fit(module, data(), data(), ckpt_path="after.ckpt")
    seen["resumed"] = (other.current_epoch, other.global_step)
    return seen


def epochs_that_are_counted(pl: Any) -> Observed:
    def note(hook: str) -> Any:
        return lambda self: self.notes.append((hook, self.current_epoch, self.trainer.current_epoch))

    hooks = ("on_train_start", "on_train_epoch_start", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end")
    module = net(pl, **{hook: note(hook) for hook in hooks})
    own = trainer(pl)
    own.fit(module, data(), data())
    own.save_checkpoint("two.ckpt")
    resumed, other = net(pl, on_train_start=note("on_train_start")), trainer(pl, max_epochs=3)
    other.fit(resumed, data(), ckpt_path="two.ckpt")
    return {"notes": module.notes, "after": own.current_epoch, "resumed": resumed.notes, "end": other.current_epoch}


def metrics_in_hooks(pl: Any) -> Observed:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def note(hook: str) -> Any:
        def call(self: Any, *args: Any) -> None:
            metrics = numbers(self.trainer.callback_metrics)
            if hook == "on_train_batch_end":
                metrics = {name: value for name, value in metrics.items() if not name.endswith("epoch")}
            self.notes.append((hook, metrics))

        return call

    hooks = ("on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end")
    module, own = (
        net(pl, training_step=training_step, **{hook: note(hook) for hook in hooks}),
        trainer(pl, max_epochs=1),
    )
    own.fit(module, data(4), data(4))
    return {"notes": module.notes, "logged": numbers(own.logged_metrics)}


def batches_moved_by_super(pl: Any) -> Observed:
    def transfer_batch_to_device(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.notes.append((str(device), dataloader_idx))
        return pl.LightningModule.transfer_batch_to_device(self, batch, device, dataloader_idx)

    module = net(pl, transfer_batch_to_device=transfer_batch_to_device)
    trainer(pl, max_epochs=1).fit(module, data(4), data(4))
    return {"notes": module.notes}


def files_after_a_resume(pl: Any) -> Observed:
    def checkpoint() -> Any:
        return pl.ModelCheckpoint(dirpath="kept", filename="{epoch}", save_top_k=1, monitor="val_loss", mode="max")

    own = trainer(pl, enable_checkpointing=True, callbacks=[checkpoint()])
    own.fit(net(pl), data(), data())
    first = sorted(path.name for path in Path("kept").iterdir())
    other = pl.ModelCheckpoint(dirpath="others", filename="{epoch}", save_top_k=1, monitor="epoch", mode="max")
    path = Path("kept", first[0])
    trainer(pl, max_epochs=4, enable_checkpointing=True, callbacks=[other]).fit(net(pl), data(), data(), ckpt_path=path)
    return {folder: sorted(path.name for path in Path(folder).iterdir()) for folder in ("kept", "others")}


# --- rows of docs/lightning.md --------------------------------------------------------------------------------------


def loss_of_closures(pl: Any) -> Observed:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = self.trainer.callback_metrics["loss_step"]
        self.notes.append((round(float(outputs["loss"]), 4), round(float(step), 4)))

    module = net(
        pl,
        training_step=training_step,
        on_train_batch_end=on_train_batch_end,
        configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3),
    )
    own = trainer(pl, max_epochs=1)
    own.fit(module, data())
    return {"notes": module.notes, "epoch": numbers(own.callback_metrics), "global_step": own.global_step}


def settings_that_are_none(pl: Any) -> Observed:
    by_steps = trainer(pl, max_epochs=None, max_steps=5, gradient_clip_val=0, limit_val_batches=None)
    by_steps.fit(net(pl), data())
    without = trainer(pl, max_epochs=None, limit_train_batches=1)
    without.fit(net(pl, on_train_epoch_end=lambda self: setattr(self.trainer, "should_stop", True)), data())
    return {
        "max_epochs": by_steps.max_epochs,
        "steps": by_steps.global_step,
        "without limits": (without.max_epochs, without.max_steps, without.current_epoch),
        "limit_val_batches": by_steps.limit_val_batches,
        "log_every_n_steps": by_steps.log_every_n_steps,
        "loggers": by_steps.loggers,
    }


def limits_in_batches(pl: Any) -> Observed:
    seen = {}
    for limit in (0, 3, 0.5, 1.0, 2.0):
        own, module = trainer(pl, max_epochs=1, limit_train_batches=limit, limit_val_batches=limit), net(pl)
        try:
            own.fit(module, data(), data())
        except Exception:  # noqa: BLE001 - of a class of each framework's own
            seen[limit] = "refused"
        else:
            seen[limit] = (own.global_step, own.num_val_batches)
    return seen


def what_ends_an_epoch(pl: Any) -> Observed:
    class Callback(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    by_callback, by_module = trainer(pl, callbacks=[Callback()]), trainer(pl)
    by_callback.fit(net(pl), data())
    by_module.fit(net(pl, on_train_batch_start=on_train_batch_start), data())
    return {"by callback": by_callback.global_step, "by module": (by_module.global_step, by_module.current_epoch)}


def loaders_that_are_asked_for_again(pl: Any) -> Observed:
    def ask(kind: str) -> Any:
        def loader(self: Any) -> Any:
            self.notes.append((kind, self.trainer.current_epoch))
            return data(4)

        return loader

    module = net(pl, train_dataloader=ask("train"), val_dataloader=ask("validate"))
    settings = {"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 2}
    trainer(pl, max_epochs=4, **settings).fit(module)
    kinds = ("train", "validate")  # each framework asks for them in a different order
    return {kind: [epoch for name, epoch in module.notes if name == kind] for kind in kinds}


def one_batch_to_overfit(pl: Any) -> Observed:
    def step(kind: str) -> Any:
        def call(self: Any, batch: Any, batch_idx: int) -> Any:
            self.notes.append((kind, batch[1].flatten().mul(10).round().int().tolist()))
            return self.loss(batch)

        return call

    module = net(pl, training_step=step("train"), validation_step=step("validate"))
    x = data()
    trainer(pl, overfit_batches=2).fit(module, x, x)
    return {"notes": module.notes}


def reductions_of_an_epoch(pl: Any) -> Observed:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        for reduction in ("mean", "sum", "min", "MAX", "avg"):
            self.log(reduction, float(batch_idx + 1), on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log_dict({"a": 1.0, "b": 2 * batch_idx}, on_epoch=True, on_step=False, batch_size=batch_idx + 1)
        return self.loss(batch)

    own = trainer(pl, max_epochs=1)
    own.fit(net(pl, training_step=training_step), data(7))  # the last batch has one sample
    return numbers(own.callback_metrics)


def two_validation_loaders(pl: Any) -> Observed:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("together", float(dataloader_idx), add_dataloader_idx=False) if dataloader_idx == 1 else None

    module = net(
        pl,
        validation_step=validation_step,
        on_validation_batch_start=lambda self, batch, batch_idx, dataloader_idx: self.notes.append(batch_idx),
    )
    results = trainer(pl).validate(module, [data(4), data(6)], verbose=False)
    return {"results": [numbers(of_loader) for of_loader in results], "batches": module.notes}


def a_plateau_with_a_monitor(pl: Any) -> Observed:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    module, own = net(pl, configure_optimizers=configure_optimizers), trainer(pl, max_epochs=3)
    own.fit(module, data(), data())
    return {"lr": own.optimizers[0].param_groups[0]["lr"]}


def names_of_checkpoints(pl: Any) -> Observed:
    callback = pl.ModelCheckpoint(
        dirpath="saved", filename="{epoch}-{val_loss:.3f}-{missing}", monitor="val_loss", save_top_k=2
    )
    by_epoch = pl.ModelCheckpoint(dirpath="by_epoch", monitor="epoch", mode="max")
    module = net(pl)
    trainer(pl, max_epochs=3, enable_checkpointing=True, callbacks=[callback, by_epoch]).fit(module, data(), data())
    return {
        "saved": sorted(path.name for path in Path("saved").iterdir()),
        "best": Path(callback.best_model_path).name,
        "score": round(float(callback.best_model_score), 4),
        "kth": Path(callback.kth_best_model_path).name,
        "by epoch": Path(by_epoch.best_model_path).name,
    }


def an_early_stop(pl: Any) -> Observed:
    stopping = pl.EarlyStopping("val_loss", min_delta=10.0, patience=2)
    own = trainer(pl, max_epochs=9, callbacks=[stopping])
    own.fit(net(pl), data(), data())
    best = round(float(stopping.best_score), 4)
    return {"stopped": stopping.stopped_epoch, "waited": stopping.wait_count, "best": best, "epoch": own.current_epoch}


def a_stop_inside_an_epoch(pl: Any) -> Observed:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.global_step >= 6

    module = net(
        pl,
        on_train_batch_end=on_train_batch_end,
        on_validation_epoch_end=lambda self: self.notes.append(("validated", self.global_step)),
        on_train_epoch_end=lambda self: self.notes.append(("epoch ended", self.global_step)),
    )
    own = trainer(pl, max_epochs=5)
    own.fit(module, data(), data())
    return {"notes": module.notes, "global_step": own.global_step}


def validations_inside_an_epoch(pl: Any) -> Observed:
    seen = {}
    for interval in (0.5, 3, 1.0):
        module = net(pl, on_validation_start=lambda self: self.notes.append(self.global_step))
        trainer(pl, val_check_interval=interval).fit(module, data(), data())
        seen[interval] = module.notes
    return seen


def schedulers_of_steps_and_epochs(pl: Any) -> Observed:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # two in each epoch of 4
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        return [optimizer], [{"scheduler": by_step, "interval": "step", "frequency": 2}, by_epoch]

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append(round(self.trainer.optimizers[0].param_groups[0]["lr"], 6))

    module = net(pl, configure_optimizers=configure_optimizers, on_train_batch_start=on_train_batch_start)
    trainer(pl).fit(module, data())
    return {"lr": module.notes}


def rates_around_validation(pl: Any) -> Observed:
    """The rate at each forward (S), batch end (E), validation (V) and epoch end (e), and its steps (L, or M)."""

    def rates(scheduler: Any, interval: str = "epoch", **settings: Any) -> str:
        def note(what: str, value: Any = None) -> Any:
            def hook(self: Any, *_: Any) -> Any:
                self.notes.append(f"{what}{self.trainer.optimizers[0].param_groups[0]['lr']:.3g}")
                return value(self, *_) if value else None

            return hook

        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            own = {"scheduler": scheduler(optimizer), "interval": interval, "monitor": "val_loss"}
            return [optimizer], [own, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)][: 1 + (interval == "step")]

        def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
            self.notes.append("L" if metric is None else "M")
            pl.LightningModule.lr_scheduler_step(self, scheduler, metric)

        module = net(
            pl,
            training_step=note("S", lambda self, batch, batch_idx: self.loss(batch) * 0.01),
            on_train_batch_end=note("E"),
            on_validation_start=note("V"),
            on_train_epoch_end=note("e"),
            configure_optimizers=configure_optimizers,
            lr_scheduler_step=lr_scheduler_step,
        )
        trainer(pl, **settings).fit(module, data(4), data(2))
        return " ".join(module.notes)

    schedulers = torch.optim.lr_scheduler
    decay, halve = lambda o: schedulers.StepLR(o, 1, 0.1), lambda o: schedulers.StepLR(o, 1, 0.5)
    plateau = lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=1.0)  # noqa: E731
    return {
        "epochs": rates(decay),
        "validation inside": rates(decay, val_check_interval=0.5),
        "steps, then epochs": rates(halve, "step", max_epochs=1),
        "accumulated": rates(decay, accumulate_grad_batches=3),
        "cut short": rates(decay, max_steps=3),
        "plateau": rates(plateau),
    }


def steps_around_the_forward(pl: Any) -> Observed:
    """The order of hooks with an ``optimizer_step`` of the module's own, and what the forward sees of it."""
    short = {
        "on_train_batch_start": "start",
        "on_before_zero_grad": "zero",
        "on_before_backward": "before",
        "on_after_backward": "after",
        "on_before_optimizer_step": "update",
        "on_train_batch_end": "end",
    }

    def order(*, sets: bool = True, skips: bool = False, lbfgs: bool = False, **settings: Any) -> tuple[str, int]:
        def note(name: str) -> Any:
            return lambda self, *args: self.notes.append(name)

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.notes.append(f"forward {getattr(self, 'knob', 0)}")
            return None if skips else self.loss(batch)

        def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            self.notes.append(f"step {batch_idx}")
            self.knob = batch_idx + 1
            pl.LightningModule.optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)

        def clip(self: Any, *args: Any, **kwargs: Any) -> None:
            self.notes.append("clip")

        def configure_optimizers(self: Any) -> Any:
            parameters = self.parameters()
            return torch.optim.LBFGS(parameters, max_iter=2) if lbfgs else torch.optim.SGD(parameters, lr=0.1)

        own = {"training_step": training_step, "configure_gradient_clipping": clip}
        own |= {"optimizer_step": optimizer_step} if sets else {}
        hooks = {name: note(shown) for name, shown in short.items()}
        module = net(pl, configure_optimizers=configure_optimizers, **own, **hooks)
        its_trainer = trainer(pl, **{"max_epochs": 1, **settings})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without a loss
            its_trainer.fit(module, data(4))
        return " ".join(module.notes), its_trainer.global_step

    return {
        "each batch": order(limit_train_batches=1),
        "accumulated": order(accumulate_grad_batches=2),
        "LBFGS": order(sets=False, lbfgs=True, limit_train_batches=1),
        "LBFGS, too": order(lbfgs=True, limit_train_batches=1),
        "without a loss": order(skips=True),
        "without a loss, not overridden": order(sets=False, skips=True, max_steps=2, max_epochs=-1),
    }


def accumulation_at_an_uneven_end(pl: Any) -> Observed:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.global_step)

    module, own = net(pl, on_train_batch_end=on_train_batch_end), trainer(pl, accumulate_grad_batches=3)
    own.fit(module, data())
    return {"notes": module.notes, "stepping": own.estimated_stepping_batches}


def hooks_of_a_fit(pl: Any) -> Observed:
    names = [
        *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
        *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    ]

    def note(name: str) -> Any:
        return lambda self, *args: self.notes.append(name)

    module = net(pl, **{name: note(name) for name in names})
    trainer(pl, max_epochs=1).fit(module, data(4), data(2))
    return {"hooks": module.notes}


def what_is_refused(pl: Any) -> Observed:
    """Mistakes that both refuse; the words are each one's own."""

    def refused(program: Any) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program()
        except Exception:  # noqa: BLE001 - of a class of each framework's own
            return True
        return False

    def fit(*callbacks: Any, **settings: Any) -> Any:
        return lambda: trainer(pl, callbacks=list(callbacks), **settings).fit(net(pl), data(), data())

    return {
        "learning rates without a logger": refused(fit(pl.LearningRateMonitor())),
        "top k without a monitor": refused(lambda: pl.ModelCheckpoint(save_top_k=3)),
        "a metric that was not logged": refused(fit(pl.EarlyStopping("nothing"))),
        "a fraction of no batch": refused(fit(limit_train_batches=0.1)),
        "an unknown clipping": refused(lambda: trainer(pl, gradient_clip_algorithm="l2")),
        "validation that never comes": refused(fit(val_check_interval=100)),
        "one callback twice": refused(fit(pl.EarlyStopping("val_loss"), pl.EarlyStopping("val_loss"))),
        "a step without its closure": refused(
            lambda: trainer(pl).fit(net(pl, optimizer_step=lambda self, *args: None), data())
        ),
        "a loss that is a list": refused(
            lambda: trainer(pl).fit(net(pl, training_step=lambda self, batch, batch_idx: [1.0]), data())
        ),
        "a metric that is a string": refused(
            lambda: trainer(pl).fit(net(pl, validation_step=lambda self, b, i: self.log("x", "y")), data(), data())
        ),
    }
