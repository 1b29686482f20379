"""One GPU, one process: seeds, resuming, precisions, compilation, and out-of-memory messages."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from on_gpu import DEVICE, ON_CPU, WIDTH, Net, fitted, loader, quiet_on_gpu, weights_of
from torch._dynamo.testing import CompileCounterWithBackend

import echelon
from echelon import Callback

pytestmark = pytest.mark.gpu

# Triton, which Inductor writes for, builds a small module of Python
HAS_COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
CAN_BUILD = HAS_COMPILER and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def test_two_runs_of_one_seed_are_equal_to_the_bit_with_dropout():
    assert torch.equal(weights_of(fitted(dropout=0.5)), weights_of(fitted(dropout=0.5)))
    assert not torch.equal(weights_of(fitted(dropout=0.5)), weights_of(fitted(seed=4, dropout=0.5)))


def test_what_a_validation_draws_on_the_device_does_not_change_training():
    runs = [
        fitted(dropout=0.5, draws=draws, validation=loader(64), val_check_interval=5, num_sanity_val_steps=0)
        for draws in (False, True)
    ]
    assert torch.equal(*map(weights_of, runs))


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_a_run_goes_on_to_the_bit(tmp_path):
    path = tmp_path / "a.ckpt"
    undisturbed = fitted(dropout=0.5)
    fitted(dropout=0.5, max_steps=15, callbacks=[SaveAt(10, path)])
    echelon.seed_everything(99, verbose=False)
    resumed = Net(dropout=0.5)
    quiet_on_gpu().fit(resumed, loader(), ckpt_path=path)
    assert torch.equal(weights_of(undisturbed), weights_of(resumed))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_every_precision_comes_near_to_float32(precision):
    plain, other = weights_of(fitted()), weights_of(fitted(precision=precision))
    assert torch.isfinite(other).all()
    assert (plain - other).norm() < 0.05 * plain.norm()


def test_a_module_with_a_summary_is_compiled():
    counter = CompileCounterWithBackend("aot_eager")
    module = Net()
    module.example_input_array = torch.randn(2, WIDTH)
    quiet_on_gpu(compile={"backend": counter}, enable_model_summary=True).fit(module, loader())
    assert counter.frame_count


@pytest.mark.skipif(ON_CPU or not CAN_BUILD, reason="needs a GPU, a C compiler and Python's headers")
def test_inductor_trains_like_eager():
    plain, compiled = weights_of(fitted()), weights_of(fitted(compile=True))
    assert (plain - compiled).norm() < 1e-2 * plain.norm()


@pytest.mark.skipif(ON_CPU, reason="needs a GPU's memory")
def test_a_device_that_is_full_is_named():
    class Greedy(Net):
        def training_step(self, batch, batch_idx):
            self.kept = torch.empty(1 << 42, device=self.device)

    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"[0-9.]+ (GiB|TiB)"):
        quiet_on_gpu().fit(Greedy(), loader())


@pytest.mark.parametrize("setting", ["full", "selective", echelon.ActivationCheckpointing(offload=True)])
def test_activation_checkpointing_computes_the_same(setting):
    plain = weights_of(fitted(dropout=0.1))
    torch.testing.assert_close(weights_of(fitted(dropout=0.1, activation_checkpointing=setting)), plain)
    assert DEVICE in ("cpu", "cuda")
