"""Third-party programs train in the Trainer as in their original loop, with the same losses.

Each ``port_*.py`` named here holds both: the loop as people write it, ``original``, and ``ported``, with the same seed
and data.
"""

import inspect
import tempfile
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from recording_logger import RecordingLogger

from echelon import FSDPStrategy
from echelon.testing import run_ranks

PROGRAMS = [
    "dcgan",
    "detection",
    "dict_columns",
    "frozen_backbone",
    "graphs",
    "nanogpt",
    "sam",
    "sine_lbfgs",
    "stream",
    "transformers",
    "vae",
    "word_language_model",
]


def arguments_of(function, **values):
    """Return the values that a function takes by name: not every program has dropout."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def port(name, folder, strategy="single", **values):
    """Return the losses that the port of a program logs, and its trained model."""
    program = import_module(f"port_{name}")
    logger = RecordingLogger(folder)
    model = program.ported(
        **arguments_of(program.ported, **values),
        accelerator="cpu",
        strategy=strategy,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    series = [metrics for _, metrics in logger.records]
    return [metrics[key] for metrics in series for key in ("loss", "loss_step", "loss_g") if key in metrics], model


def loop(name, **values):
    """Return the losses of the loop that a program came with, and its trained model."""
    program = import_module(f"port_{name}")
    return program.original(**arguments_of(program.original, **values))


def ports_of_rank(names, folder):
    """Port every program in a process of two, and the transformers model in shards as well."""
    losses = {name: port(name, folder, "ddp", world_size=2, dropout=0.0)[0] for name in names}
    if "transformers" in names:
        for is_deferred in (False, True):
            sharded = FSDPStrategy(deferred_init=is_deferred)
            losses[f"fsdp, {is_deferred=}"] = port("transformers", folder, sharded, dropout=0.0)[0]
    return losses


@pytest.fixture(scope="module")
def on_two_ranks():
    """Return the losses of every program in two processes: one launch for all, as starting them takes longest."""
    names = [name for name in PROGRAMS if name != "transformers" or find_spec("transformers")]
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(ports_of_rank, 2, names, folder, timeout=400)[0]


@pytest.fixture
def program(request):
    if request.param == "transformers":
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_one_process_takes_the_steps_of_the_loop_to_the_bit(program, tmp_path):
    losses, model = loop(program, dropout=0.2)
    ported_losses, ported_model = port(program, str(tmp_path), dropout=0.2)
    assert len(set(losses)) == len(losses)
    assert ported_losses == losses
    weights = model.state_dict()
    assert weights.keys() == ported_model.state_dict().keys()
    for name, value in ported_model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_two_processes_take_the_steps_of_the_loop_but_for_rounding(program, on_two_ranks):
    losses, _ = loop(program, dropout=0.0, ranks=2)
    assert on_two_ranks[program] == pytest.approx(losses, rel=1e-6, abs=0)


def test_a_model_of_transformers_in_shards_begins_with_the_same_weights_deferred_or_not(on_two_ranks):
    pytest.importorskip("transformers")
    losses, _ = loop("transformers", dropout=0.0)
    assert on_two_ranks["fsdp, is_deferred=False"] == pytest.approx(losses, rel=1e-6, abs=0)
    assert on_two_ranks["fsdp, is_deferred=True"] == on_two_ranks["fsdp, is_deferred=False"]
