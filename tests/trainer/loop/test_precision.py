"""Each precision computes what the same lines of torch compute; gradients are unscaled before anything reads them."""

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

from echelon import ConfigError, TrainModule

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


class Dtypes(Regression):
    """Notes the dtypes that it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
        self.noted = set()

    def note(self, batch):
        out = self(batch[0])
        self.noted.add((self.net.weight.dtype, batch[0].dtype, out.dtype, torch.ones(1).dtype))
        return nn.functional.mse_loss(out.float(), batch[1].float())

    def training_step(self, batch, batch_idx):
        return self.note(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.note(batch))

    def predict_step(self, batch, batch_idx):
        self.note(batch)


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("precision", "noted"),
    [
        ("32-true", (F32, F32, F32, F32)),
        ("bf16-mixed", (F32, F32, BF16, F32)),
        ("16-mixed", (F32, F32, F16, F32)),
        ("bf16-true", (BF16, BF16, BF16, BF16)),
        ("64-true", (F64, F64, F64, F64)),
        (32, (F32, F32, F32, F32)),
        ("bf16", (F32, F32, BF16, F32)),
        (16, (F32, F32, F16, F32)),
        ("64", (F64, F64, F64, F64)),
    ],
)
def test_parameters_batches_outputs_and_new_tensors_have_the_dtypes_of_the_precision(precision, noted):
    module = Dtypes()
    trainer = quiet(max_epochs=1, precision=precision)
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["val_loss"].isfinite()
    trainer.predict(module, loader())
    assert module.noted == {noted}
    assert module.steps.dtype is torch.long
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_an_error_in_a_step_leaves_the_default_dtype_as_it_was(precision):
    class Broken(Regression):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(precision=precision).fit(Broken(), loader())
    assert torch.get_default_dtype() is torch.float32


# --- mixed precision, against the same by hand ---


class Net(TrainModule):
    """Its loss is huge at some batches, so that scaled gradients overflow there."""

    def __init__(self, overflows=(), clip=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.overflows, self.clip = overflows, clip
        self.norms = []

    def loss(self, batch, batch_idx):
        loss = 0.01 * nn.functional.mse_loss(self.net(batch[0]).float(), batch[1] + 3)
        return loss * 1e30 if batch_idx in self.overflows else loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=5.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Net):
    def __init__(self, overflows=(), clip=None):
        super().__init__(overflows, clip)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        if self.clip is not None:
            self.clip_gradients(optimizer, *self.clip)
        optimizer.step()


def by_hand(precision, *, overflows=(), accumulate=1, clip=None, schedules=True):
    """Train with autocast and GradScaler as torch's documentation shows it; return module, norms, skips and rates."""
    torch.manual_seed(0)
    module = Net(overflows)
    (optimizer,), (config,) = module.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    norms, skipped = [], 0
    batches = list(loader(16, 2))
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for batch_idx in range(start, start + accumulate):
            with torch.autocast("cpu", dtype=HALF[precision]):
                loss = module.loss(batches[batch_idx], batch_idx)
            scaler.scale(loss * (1 / accumulate)).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        if clip is not None:
            value, algorithm = clip
            clip_ = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
            clip_(module.parameters(), value)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
        elif schedules:
            config["scheduler"].step()
    return module, norms, skipped, optimizer.param_groups[0]["lr"]


def fit(module, precision, **settings):
    trainer = quiet(max_epochs=1, precision=precision, **settings)
    trainer.fit(module, loader(16, 2))
    return trainer


@pytest.mark.parametrize("clip", [None, (0.01, "norm"), (0.005, "value")])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("precision", "overflows"), [("bf16-mixed", ()), ("16-mixed", ()), ("16-mixed", (2, 5))])
def test_mixed_precision_takes_the_steps_of_torch_by_hand(precision, overflows, accumulate, clip):
    expected, norms, skipped, lr = by_hand(precision, overflows=overflows, accumulate=accumulate, clip=clip)
    settings = {"gradient_clip_val": clip[0], "gradient_clip_algorithm": clip[1]} if clip else {}
    torch.manual_seed(0)
    module = Net(overflows)
    trainer = fit(module, precision, accumulate_grad_batches=accumulate, **settings)
    assert torch.equal(weights(module), weights(expected))
    assert weights(module).isfinite().all()
    assert module.norms == pytest.approx(norms, rel=1e-6, nan_ok=True)
    assert trainer.counters.skipped_steps == skipped == len(overflows)
    assert trainer.global_step == 8 // accumulate
    assert trainer.optimizers[0].param_groups[0]["lr"] == lr


@pytest.mark.parametrize("clip", [None, (0.01, "norm"), (0.005, "value")])
@pytest.mark.parametrize("overflows", [(), (2, 5)])
def test_manual_optimization_takes_the_steps_of_torch_by_hand(overflows, clip):
    expected, norms, skipped, _ = by_hand("16-mixed", overflows=overflows, clip=clip, schedules=False)
    torch.manual_seed(0)
    module = Manual(overflows, clip)
    trainer = fit(module, "16-mixed")
    assert torch.equal(weights(module), weights(expected))
    assert trainer.counters.skipped_steps == skipped == len(overflows)
    assert trainer.global_step == 8
    if clip is None:
        assert module.norms == pytest.approx(norms, rel=1e-6, nan_ok=True)


class TwoAtOnce(Net):
    """One backward for two optimizers, clipped and stepped one after the other."""

    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, 0.01)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[index].parameters(), lr=5.0) for index in (0, 2)]


@pytest.mark.parametrize("manual", [False, True])
def test_two_optimizers_share_one_scaled_backward(manual):
    def run(precision):
        torch.manual_seed(0)
        module = TwoAtOnce(manual)
        fit(module, precision, gradient_clip_val=None if manual else 0.01)
        return weights(module)

    torch.testing.assert_close(run("16-mixed"), run("32-true"), rtol=0, atol=1e-3)


class StepsTwice(Net):
    """Steps one optimizer twice in a training step; the second time, with the weights of the first."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, batch_idx))
            optimizer.step()


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_second_forward_in_a_step_sees_the_weights_of_the_first_update(precision):
    torch.manual_seed(0)
    expected = StepsTwice()
    (optimizer,), _ = expected.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    for batch_idx, batch in enumerate(loader(16, 2)):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF[precision]):
                loss = expected.loss(batch, batch_idx)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.manual_seed(0)
    module = StepsTwice()
    trainer = fit(module, precision)
    assert torch.equal(weights(module), weights(expected))
    assert trainer.counters.optimizer_steps == [16]


class MovesWeights(Net):
    """Moves the weights by hand between two backwards of a training step, as sharpness-aware minimization does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def step(self, loss, backward, optimizer):
        optimizer.zero_grad()
        backward(loss())
        moves = [50 * parameter.grad / parameter.grad.norm() for parameter in self.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(self.parameters()), moves)
        optimizer.zero_grad()
        backward(loss())
        with torch.no_grad():
            torch._foreach_sub_(list(self.parameters()), moves)
        optimizer.step()

    def training_step(self, batch, batch_idx):
        self.step(lambda: self.loss(batch, batch_idx), self.manual_backward, self.optimizers())


def test_a_second_forward_in_a_step_sees_weights_that_were_moved_by_hand():
    torch.manual_seed(0)
    expected = MovesWeights()
    (optimizer,), _ = expected.configure_optimizers()
    for batch_idx, batch in enumerate(loader(16, 2)):

        def loss(batch=batch, batch_idx=batch_idx):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return expected.loss(batch, batch_idx)

        expected.step(loss, torch.Tensor.backward, optimizer)
    torch.manual_seed(0)
    module = MovesWeights()
    fit(module, "bf16-mixed")
    assert torch.equal(weights(module), weights(expected))


def test_the_scale_goes_on_where_a_checkpoint_left_it(tmp_path):
    expected, *_ = by_hand("16-mixed", overflows=(2, 5))
    torch.manual_seed(0)
    begun = Net((2, 5))
    fit(begun, "16-mixed", max_steps=4).save_checkpoint(tmp_path / "begun.ckpt")
    resumed = Net((2, 5))
    trainer = quiet(max_epochs=1, precision="16-mixed")
    trainer.fit(resumed, loader(16, 2), ckpt_path=tmp_path / "begun.ckpt")
    assert torch.equal(weights(resumed), weights(expected))
    assert trainer.counters.skipped_steps == 2
    assert trainer.scaler.get_scale() == 2.0**14


def test_scaled_gradients_are_refused_to_an_optimizer_that_evaluates_the_loss_itself():
    class Second(Regression):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match=r"precision='16-mixed' scales gradients.*LBFGS.*use bf16-mixed"):
        quiet(precision="16-mixed").fit(Second(), loader())
