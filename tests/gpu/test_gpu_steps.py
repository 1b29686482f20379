"""From the sixth step on, no step makes the host wait for the GPU, as torch itself detects."""

import warnings

import pytest
import torch
from on_gpu import ON_CPU, Net, loader, quiet_on_gpu

import echelon
from echelon import ActivationCheckpointing, Callback
from echelon.callbacks import StragglerMonitor

pytestmark = pytest.mark.gpu

OFFLOADED = ActivationCheckpointing(offload=True)
ONLY_OFFLOADED = ActivationCheckpointing(mode=None, offload=True)


class NoWaits(Callback):
    """Lets torch raise where something waits for the device, from one step to the next."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step >= 5 and not ON_CPU:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.relax()

    def on_exception(self, trainer, module, exception):
        self.relax()

    def relax(self):
        if not ON_CPU:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({}, {"gradient_clip_val": 1.0}, id="clipping"),
        pytest.param({"logs": True}, {"max_steps": 300, "log_every_n_steps": 1000}, id="300 logged values"),
        pytest.param({"counts": True}, {"accumulate_grad_batches": 2}, id="Loss over micro-batches"),
        pytest.param({}, {"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param({}, {"precision": "bf16-true"}, id="bf16-true"),
        pytest.param({}, {"callbacks": [echelon.EMAWeightAveraging()]}, id="exponential average"),
        pytest.param({}, {"callbacks": [StragglerMonitor(1, sample_every=1)]}, id="times of the parts of steps"),
        pytest.param({}, {"activation_checkpointing": OFFLOADED}, id="activations offloaded"),
        pytest.param({}, {"activation_checkpointing": ONLY_OFFLOADED}, id="all activations offloaded"),
    ],
)
def test_a_step_does_not_wait(module, settings):
    callbacks = [*settings.get("callbacks", ()), NoWaits()]
    quiet_on_gpu(**{**settings, "callbacks": callbacks}).fit(Net(**module), loader(16 * 400, pin_memory=not ON_CPU))


class CountsWaits(NoWaits):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 5 and not ON_CPU:
            torch.cuda.set_sync_debug_mode("warn")


def test_a_step_of_16_mixed_waits_once_for_torchs_scaler():
    """GradScaler itself reads whether gradients overflowed, unless the optimizer is fused; so the watch sees it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_on_gpu(precision="16-mixed", callbacks=[CountsWaits()], max_steps=6)
        trainer.fit(Net(), loader(pin_memory=not ON_CPU))
    waits = [warning for warning in caught if "called a synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == (not ON_CPU)


def test_predictions_are_those_of_the_module():
    module = Net()
    trainer = quiet_on_gpu()
    predictions = torch.cat(trainer.predict(module, loader(64)))
    assert predictions.device.type == "cpu"
    whole = torch.cat([batch[0] for batch in loader(64)])
    torch.testing.assert_close(predictions, module.cpu()(whole).detach(), rtol=1e-3, atol=1e-3)
