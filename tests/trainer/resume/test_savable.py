"""What a checkpoint cannot hold is found when a fit starts, or after its first step, not at the first save."""

import datetime
import enum
import zoneinfo
from dataclasses import dataclass

import pytest
import torch
import torch.utils._pytree as pytree
from as_rank import calm_down, double_trainer, world_size
from sweep import IS_SWEEP
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    TrainModule,
    register_tensor_class,
)
from echelon.common.errors import CheckpointError, ConfigError, EchelonError, ModuleError
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load, save


class Wrapped(torch.Tensor):
    """Weights inside another tensor, as torchao's are; fully_shard can shard it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return out
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            return None
        return type(self)(outputs[0]), outputs


class Kept(Wrapped):
    """The same, registered, and with a context of several kinds of values."""

    def __tensor_flatten__(self):
        return ["inner"], {"shape": self.shape, "how": Rounding("even", (1, 2))}

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        assert meta == {"shape": size, "how": Rounding("even", (1, 2))}
        return Kept(inner["inner"])


@dataclass
class Rounding:
    to: str
    digits: tuple[int, int]


register_tensor_class(Kept)


class Layer(nn.Module):
    def __init__(self, wraps):
        super().__init__()
        frozen = torch.randn(4, 4)
        self.frozen = nn.Parameter(wraps(frozen) if wraps else frozen, requires_grad=False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.frozen + self.adapter(x)


class Net(TrainModule):
    def __init__(self, wraps=Wrapped, schedule=None):
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.schedule = nn.Sequential(Layer(wraps), Layer(wraps)), schedule
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.1)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


class WithoutFrozen(Net):
    """Leaves the wrapped weights out of its checkpoints."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.endswith("frozen")]:
            del checkpoint["state_dict"][name]


def fit(module, folder, *callbacks, saver=None, max_epochs=2, resumed=None, **settings):
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
    callbacks = [*callbacks, saver or ModelCheckpoint(folder, save_last=True)]
    settings = {"precision": "32-true", "enable_checkpointing": True, **settings}
    trainer = double_trainer(max_epochs=max_epochs, callbacks=callbacks, **settings)
    trainer.fit(module, DataLoader(data, 4 // world_size()), ckpt_path=resumed)
    return trainer


# --- weights that wrap other tensors

ON_RANKS = ("ddp", "zero", "fsdp") if IS_SWEEP else ("zero", "fsdp")


def wrapped_everywhere(folder):
    """Return, by strategy, the error of a module with wrapped weights, its steps, and what the way out saved."""
    calm_down()
    found = {}
    for strategy in ON_RANKS if world_size() > 1 else ("single",):
        module = Net()
        with pytest.raises(EchelonError) as raised:
            fit(module, f"{folder}/{strategy}", strategy=strategy)
        fit(WithoutFrozen(), f"{folder}/{strategy}", strategy=strategy, max_epochs=1)
        fit(WithoutFrozen(), f"{folder}/{strategy}", strategy=strategy, resumed="last")
        fit(WithoutFrozen(), f"{folder}/{strategy}/whole", strategy=strategy)
        fit(Net(wraps=None), f"{folder}/{strategy}/plain", strategy=strategy)
        saved = [load(f"{folder}/{strategy}{part}/last.ckpt")["model"] for part in ("", "/whole", "/plain")]
        found[strategy] = str(raised.value), module.steps, saved
    return found


def assert_refused(found):
    for strategy, (error, steps, (resumed, whole, plain)) in found.items():
        assert "state['model']['layers.0.frozen'] is a Wrapped, which wraps other tensors" in error, strategy
        assert "call echelon.register_tensor_class(Wrapped)" in error
        assert "on_save_checkpoint" in error
        assert "strict_loading = False" in error
        assert steps == 0
        assert sorted(whole) == [name for name in sorted(plain) if not name.endswith("frozen")]
        for name, value in whole.items():
            torch.testing.assert_close(resumed[name], value, rtol=0, atol=0)
            torch.testing.assert_close(plain[name], value)


def test_wrapped_weights_are_refused_at_the_start_and_can_be_left_out(memory_path):
    assert_refused(wrapped_everywhere(str(memory_path)))


@pytest.mark.sweep
def test_wrapped_weights_are_refused_at_the_start_in_every_layout(memory_path):
    for found in run_ranks(wrapped_everywhere, 2, str(memory_path)):
        assert_refused(found)


def kept(folder):
    """Return, by strategy, what runs with registered weights have at the end: resumed, whole, and with plain ones."""
    calm_down()
    found = {}
    for strategy in ON_RANKS if world_size() > 1 else ("single",):
        for name, wraps in (("", Kept), ("/plain", None)):
            place = f"{folder}/{strategy}{name}"
            fit(Net(wraps), place, EMAWeightAveraging(decay=0.5), strategy=strategy, max_epochs=1)
            fit(Net(wraps), place, EMAWeightAveraging(decay=0.5), strategy=strategy, resumed="last")
        fit(Net(Kept), f"{folder}/{strategy}/whole", strategy=strategy)
        found[strategy] = [load(f"{folder}/{strategy}{name}/last.ckpt") for name in ("", "/whole", "/plain")]
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2])
def test_registered_weights_are_kept_and_averages_leave_them_alone(memory_path, ranks):
    for found in [kept(str(memory_path))] if ranks == 1 else run_ranks(kept, ranks, str(memory_path)):
        for resumed, whole, plain in found.values():
            for name, value in whole["model"].items():
                now = resumed["model"][name]
                if name.endswith("frozen"):
                    assert [type(now), type(value)] == [Kept, Kept]
                    assert torch.equal(now.inner, plain["model"][name])
                    assert torch.equal(value.inner, plain["model"][name])
                else:
                    torch.testing.assert_close(resumed["trained_weights"][name], value, rtol=0, atol=0)
                    torch.testing.assert_close(now, plain["model"][name])


def test_a_registered_class_has_what_it_takes():
    with pytest.raises(ConfigError, match="register_tensor_class takes a subclass of torch.Tensor with __tensor_fl"):
        register_tensor_class(nn.Parameter)


def test_wrapped_shards_that_started_processes_could_not_return_are_refused_at_the_start(memory_path):
    with pytest.raises(ModuleError, match="layers.0.frozen is sharded, and a Wrapped.*torchrun"):
        fit(WithoutFrozen(), memory_path, strategy="fsdp", devices=2)


def test_a_run_without_checkpoints_trains_wrapped_weights(memory_path):
    module = Net()
    double_trainer(max_epochs=1, precision="32-true").fit(module, DataLoader(TensorDataset(torch.randn(4, 4))))
    fit(Net(), memory_path, saver=ModelCheckpoint(memory_path, save_top_k=0))
    assert module.steps == 4


def test_an_average_of_trained_wrapped_weights_is_refused_by_name(memory_path):
    module = Net(Kept)
    module.layers[1].frozen.requires_grad_()
    with pytest.raises(ConfigError, match="layers.1.frozen, which is trained and a Kept, which wraps other tensors"):
        fit(module, memory_path, EMAWeightAveraging())


def test_tensors_without_memory_are_never_taken_for_one_another(memory_path):
    states = {
        "wrapper": lambda: Wrapped(torch.ones(2)),
        "meta": lambda: torch.empty(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    }
    for make in states.values():
        with pytest.raises(CheckpointError, match=r"state\['part'\]\['a'\] is a .*; (or )?make it a dense tensor"):
            save(memory_path / "a.ckpt", {"part": {"a": make(), "b": make()}})
    empty = {"a": torch.zeros(0, 2), "b": torch.zeros(0, 2)}
    save(memory_path / "a.ckpt", {"part": empty})
    assert load(memory_path / "a.ckpt")["part"]["b"].shape == (0, 2)


# --- everything else


class Odd(Callback):
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


class Wrapping(torch.optim.AdamW):
    """Makes state that no checkpoint can hold in its first step."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = Wrapped(state["exp_avg"])
        return loss


class WrappingLater(torch.optim.AdamW):
    """Makes such state only for parameters that an imitation does not have."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter, state in self.state.items():
            if hasattr(parameter, "is_real"):
                state["exp_avg"] = Wrapped(state["exp_avg"])
        return loss


class WithOptimizer(Net):
    def __init__(self, kind):
        super().__init__(wraps=None)
        self.kind = kind
        for parameter in self.parameters():
            parameter.is_real = True

    def configure_optimizers(self):
        return self.kind(self.layers[0].adapter.parameters(), 0.1)


def test_the_state_of_a_callback_is_checked_before_the_first_step(memory_path):
    module = Net(wraps=None)
    with pytest.raises(CheckpointError, match=r"callbacks.*Odd.*value'\] is of type object"):
        fit(module, memory_path, Odd(object()))
    assert module.steps == 0
    fit(module, memory_path, Odd(object()), saver=ModelCheckpoint(memory_path, save_weights_only=True), max_epochs=1)
    assert module.steps == 2


@pytest.mark.parametrize("saver", [ModelCheckpoint, OnExceptionCheckpoint])
def test_the_state_that_an_optimizer_will_have_is_checked_before_the_first_step(memory_path, saver):
    module = WithOptimizer(Wrapping)
    with pytest.raises(CheckpointError, match=r"optimizers.*adapter.*exp_avg'\] is a Wrapped"):
        fit(module, memory_path, saver=saver(memory_path))
    assert module.steps == 0


def test_the_state_of_an_optimizer_is_checked_after_the_first_step(memory_path):
    module = WithOptimizer(WrappingLater)
    with pytest.raises(CheckpointError, match=r"optimizers.*adapter.*exp_avg'\] is a Wrapped"):
        fit(module, memory_path)
    assert module.steps == 1


class Unready(Callback):
    """Has its state only once training has begun."""

    def on_train_start(self, trainer, module):
        self.best = 1.0

    def state_dict(self):
        return {"best": self.best}


def test_a_state_that_exists_later_is_no_error(memory_path):
    assert fit(Net(wraps=None), memory_path, Unready()).global_step == 4


# --- schedules that hold schedules, and functions


class Warmup(LRScheduler):
    """Raises the rate, then follows another schedule, as the well-known package does."""

    def __init__(self, optimizer, after, steps=2):
        self.after, self.steps, self.inside = after, steps, {"all": [after]}
        self.shape = lambda step: min(1.0, (step + 1) / steps)
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.shape(self.last_epoch) for base in self.base_lrs]

    def step(self, epoch=None):
        if getattr(self, "last_epoch", -1) >= self.steps:
            self.after.step()
        else:
            super().step()


def test_a_schedule_that_holds_another_one_is_saved_and_resumed(memory_path, caplog):
    def schedule(optimizer):
        return {"scheduler": Warmup(optimizer, Warmup(optimizer, ExponentialLR(optimizer, 0.5), 1)), "interval": "step"}

    whole, resumed = Net(None, schedule), Net(None, schedule)
    fit(whole, memory_path / "whole", max_epochs=4)
    fit(Net(None, schedule), memory_path, max_epochs=2)
    with caplog.at_level("WARNING"):
        fit(resumed, memory_path, max_epochs=4, resumed="last")
    assert "other settings" not in caplog.text
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    one, other = (load(path / "last.ckpt")["lr_schedulers"][0] for path in (memory_path / "whole", memory_path))
    assert one == other
    assert one["after"]["after"]["last_epoch"] == 5


def test_a_schedule_that_held_another_one_is_refused_by_name(memory_path):
    def schedule(make):
        return lambda optimizer: {"scheduler": Warmup(optimizer, make(optimizer)), "interval": "step"}

    before, after = schedule(lambda optimizer: {"a": StepLR(optimizer, 1)}), schedule(lambda o: StepLR(o, 1))
    fit(Net(None, before), memory_path, max_epochs=1)
    with pytest.raises(CheckpointError, match="inside of Warmup.*holds schedules|after of Warmup"):
        fit(Net(None, after), memory_path, max_epochs=4, resumed="last")


# --- values that would come back as others


class Flags(enum.Flag):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize(
    "value",
    [
        Flags.ONE | Flags.TWO,
        enum.Enum("Inside", "A").A,
        datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    ],
    ids=["two flags", "an enum that no module has", "a time of a region"],
)
def test_a_value_that_would_come_back_as_another_is_refused_by_name(memory_path, value):
    with pytest.raises(CheckpointError, match=r"state\['part'\]\['a'\] is .*(save its value|UTC)"):
        save(memory_path / "a.ckpt", {"part": {"a": value}})
