"""Helpers for tests that train in this process, or as one rank of several."""

import os
import traceback
import warnings

from echelon import Trainer


def world_size():
    """Return the number of ranks; 1 outside `run_ranks`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def double_trainer(**settings):
    """Return a trainer on the CPU, in float64, that writes and prints nothing unless the settings say so."""
    quiet = {
        "strategy": "ddp" if world_size() > 1 else "single",
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, **settings})


def step_by_hand_on(module, loss):
    """Return the loss of a training step in automatic optimization; else step with it, and return None."""
    if module.automatic_optimization:
        return loss
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None


def calm_down():
    """Limit this rank to one core, and silence torch's warnings."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")


def attempt(function, *args):
    """Return what a function returns, or the text of its error, which the test of its case shows; others still run."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 - an error of a rank would end the other cases
        return traceback.format_exc()


def run_all(train, cases):
    """Return what ``train(*case)`` returns for each case, by its name."""
    calm_down()
    return {name: train(*case) for name, case in cases.items()}
