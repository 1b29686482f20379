"""First look: what a fit that is about to begin will do otherwise than its user may expect."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sized

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR
from torch.utils.data import RandomSampler

from ..callbacks.model_checkpoint import ModelCheckpoint
from ..strategies.torch_internals.modules import BatchNorm
from .loop.schedule import has_validation, num_steps
from .module.optimizers import LRSchedulerConfig
from .session.session import Session
from .told_lines import tell_line

_LENGTHS = {OneCycleLR: "total_steps", CosineAnnealingLR: "T_max", PolynomialLR: "total_iters", LinearLR: "total_iters"}
"""Schedules that are made for a whole run, and the attribute that holds their length."""


def look_at(session: Session, *, is_resumed: bool) -> None:
    """Log what may be meant otherwise, and warn of schedules that do not fit the run; on rank 0."""
    if session.strategy.rank or session.strategy.ranks.all.is_fake:
        return
    for line in (
        *_of_limits(session),
        *_of_shuffled_validation(session),
        *_of_savers(session),
        *_of_frozen_norms(session.module),
    ):
        tell_line(session, line)
    _warn_of_half_weights(session)
    if not is_resumed and session.module.automatic_optimization:
        for config in session.schedulers:
            _warn_of_length(session, config)
            _warn_of_warmup(session, config)
            _warn_of_no_rate(config)


def _of_limits(session: Session) -> Iterator[str]:
    """Yield what the settings of an int 1 mean, where 1.0 means another thing, and that no epoch is validated."""
    settings, data = session.settings, session.train_data
    assert data is not None
    limit, interval = settings.limit_train_batches, settings.val_check_interval
    is_small = isinstance(limit, int) and limit == 1 and not settings.fast_dev_run
    if is_small and settings.max_epochs != 1:
        yield "limit_train_batches=1 trains on 1 batch of each epoch; 1.0 is all of them."
    accumulated = settings.accumulate_grad_batches
    if data.num_batches < accumulated and not settings.fast_dev_run and settings.global_batch_size is None:
        yield (
            f"accumulate_grad_batches={accumulated} is above the {data.num_batches} batches of an epoch: each epoch is "
            f"one step, on {data.num_batches} batches."
        )
    if not has_validation(session):
        return
    if isinstance(interval, int) and interval == 1 and data.num_batches > 1:
        yield "val_check_interval=1 validates after each batch; 1.0 is once an epoch."
    every, last = settings.check_val_every_n_epoch, settings.last_epoch
    if every is not None and last is not None and every > last:
        yield f"No epoch is validated: check_val_every_n_epoch={every} is above max_epochs={last}."


def _of_shuffled_validation(session: Session) -> Iterator[str]:
    """Yield a line about validations that are cut short, and draw other samples each time."""
    settings, data = session.settings, session.evaluation_data
    if data is None or not has_validation(session) or settings.overfit_batches or settings.fast_dev_run:
        return
    for loader, num_batches in zip(data.loaders, data.num_batches, strict=True):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and num_batches < len(loader):
            yield (
                f"limit_val_batches={settings.limit_val_batches} of a validation loader that shuffles: each validation "
                "has other samples, and its metrics cannot be compared; leave shuffle=True out of the loader."
            )
            return


def _of_savers(session: Session) -> Iterator[str]:
    total = num_steps(session, session.train_data) if session.train_data is not None else math.inf
    for saver in session.callbacks:
        if isinstance(saver, ModelCheckpoint) and saver.mode == "max" and str(saver.monitor).endswith("loss"):
            yield f"ModelCheckpoint(monitor={saver.monitor!r}, mode='max') keeps the largest loss; 'min' the smallest."
        if isinstance(saver, ModelCheckpoint) and total < saver.schedule.every_n_steps and not saver.save_last:
            yield (
                f"ModelCheckpoint(every_n_train_steps={saver.schedule.every_n_steps}) saves no checkpoint in the "
                f"{int(total)} steps of this fit; lower it, or set save_last=True."
            )


def _of_frozen_norms(module: nn.Module) -> Iterator[str]:
    """Yield a line about batch norms that are frozen, but go on to change with each batch."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) and part.training and part.track_running_stats and part.affine
        if not any(parameter.requires_grad for parameter in part.parameters(recurse=False))
    ]
    if names:
        yield (
            f"The parameters of {names[0]}{f' and {len(names) - 1} other batch norms' if names[1:] else ''} are "
            "frozen, but the running statistics follow the training data; call eval() on it in __init__ to keep them."
        )


def _warn_of_length(session: Session, config: LRSchedulerConfig) -> None:
    """Warn of a schedule whose length is another count of this run: its epochs, steps or batches."""
    name, length = _length_of(config.scheduler)
    data, epochs = session.train_data, session.settings.last_epoch
    assert data is not None
    steps = num_steps(session, data)
    if name is None or config.frequency != 1 or epochs is None or math.isinf(steps):
        return
    own = {"step": int(steps), "epoch": epochs}
    others = {"epochs": epochs, "steps": int(steps), "batches": data.num_batches * epochs}
    if (num_samples := _num_samples(session)) is not None:
        others["samples"] = num_samples * epochs
    if length == own[config.interval] or (isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch"):
        return
    unit = next((unit for unit, count in others.items() if count == length and count > 1), None)
    if unit is not None:
        remedy = f"{name}={own[config.interval]}"
        if unit == "steps":
            remedy = "return {'scheduler': ..., 'interval': 'step'}"
        elif config.interval == "step":
            remedy = f"give it {name}=int(self.trainer.estimated_stepping_batches), which is {own['step']}"
        warnings.warn(
            f"{type(config.scheduler).__name__} has {name}={length}, the {unit} of this fit, but is stepped after each "
            f"{config.interval}, {own[config.interval]} times; {remedy}.",
            stacklevel=2,
        )


def _warn_of_half_weights(session: Session) -> None:
    """Warn of float16 weights that are trained in mixed precision, which keeps weights in float32."""
    precision = session.strategy.precision
    if precision.autocast_dtype is None:
        return
    names = [n for n, p in session.module.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if names:
        warnings.warn(
            f"{len(names)} parameters to train are in float16, such as {names[0]!r}, but precision={precision.name!r} "
            "computes in half precision with weights in float32: small updates are lost, and gradients cannot be "
            "unscaled. Remove module.half(), or choose precision='16-true'.",
            stacklevel=2,
        )


def _warn_of_warmup(session: Session, config: LRSchedulerConfig) -> None:
    """Warn of a linear warmup that the fit ends in the middle of."""
    scheduler, data, epochs = config.scheduler, session.train_data, session.settings.last_epoch
    assert data is not None
    if not isinstance(scheduler, LinearLR) or scheduler.end_factor <= scheduler.start_factor:
        return
    last = num_steps(session, data) if config.interval == "step" else math.inf if epochs is None else epochs
    if scheduler.total_iters * config.frequency > last:
        warnings.warn(
            f"LinearLR has total_iters={scheduler.total_iters}, a warmup that is longer than this fit, which has "
            f"{int(last)} {config.interval}s: the learning rate never reaches its value; give it fewer, or train "
            "longer (a step takes accumulate_grad_batches batches).",
            stacklevel=2,
        )


def _length_of(scheduler: object) -> tuple[str | None, int | None]:
    """Return the argument that holds a schedule's length, and that length; None for schedules of no length."""
    if isinstance(scheduler, LinearLR) and scheduler.end_factor >= scheduler.start_factor:
        return None, None  # a warmup
    if isinstance(scheduler, LambdaLR):  # as transformers makes its schedules
        given = (getattr(each, "keywords", {}).get("num_training_steps") for each in scheduler.lr_lambdas)
        length = next((each for each in given if each is not None), None)
        return ("num_training_steps" if length is not None else None), length
    name = next((name for kind, name in _LENGTHS.items() if isinstance(scheduler, kind)), None)
    return name, None if name is None else getattr(scheduler, name)


def _num_samples(session: Session) -> int | None:
    """Return the samples that the training loader draws in an epoch; None if it does not tell."""
    sampler = getattr(getattr(session.train_data, "source", None), "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


def _warn_of_no_rate(config: LRSchedulerConfig) -> None:
    """Warn that nothing is trained in the first epoch, as the learning rate begins at 0 and changes with epochs."""
    groups = getattr(getattr(config.scheduler, "optimizer", None), "param_groups", ())
    rates = [group["lr"] for group in groups]
    if config.interval == "epoch" and rates and not any(isinstance(rate, Tensor) or rate for rate in rates):
        warnings.warn(
            f"{type(config.scheduler).__name__} begins with a learning rate of 0 and is stepped after each epoch, so "
            "nothing is trained in the first; a warmup that counts steps needs "
            "{'scheduler': ..., 'interval': 'step'}.",
            stacklevel=2,
        )
