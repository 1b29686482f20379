"""An engine in one process: what its parts do, what it saves, and its messages for wrong use."""

import copy
import pickle
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    CheckpointError,
    ConfigError,
    Engine,
    Loss,
    ModuleError,
    RunError,
    Trainer,
    TrainModule,
    load_weights,
    seed_everything,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.seen_dtypes = []

    def forward(self, x, *, scale=1.0):
        hidden = self.first(x).relu()
        self.seen_dtypes.append(hidden.dtype)
        return self.second(hidden) * scale

    def loss(self, x, y):
        return nn.functional.mse_loss(self(x), y)

    def encode(self, x):
        return self.first(x)


def data(number=20):
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


@pytest.fixture
def engine():
    return Engine(accelerator="cpu")


def prepared(engine, **settings):
    """Return a module, its optimizer and a loader of batches of 4, all set up."""
    seed_everything(3, verbose=False)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return *engine.setup(net, optimizer), engine.setup_dataloaders(DataLoader(data(), 4, shuffle=True), **settings)


def train(engine, net, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = net.loss(x, y)
        engine.backward(loss)
        losses.append(loss.item())
        if engine.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    return losses


# --- modules and optimizers ------------------------------------------------------------------------------------------


def test_a_module_stays_the_object_that_it_was_and_its_copy_is_plain(engine):
    plain = Net()
    net, optimizer = engine.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert net is plain and type(net).__name__ == "Net" and isinstance(net, Net)
    assert list(net.state_dict()) == list(Net().state_dict())
    net.mark_forward_method(net.encode)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is Net and "encode" not in vars(other)
        assert torch.equal(other(torch.ones(2, 4)), net(torch.ones(2, 4)))
        other.first.weight.data.zero_()
        assert net.first.weight.any()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.backward(net(torch.ones(2, 4), scale=2.0).sum())
    optimizer.step()
    schedule.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert schedule.get_last_lr() == [pytest.approx(0.01)]


def test_half_precision_computes_inside_and_returns_float32_outside():
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    net = engine.setup(Net())
    assert net(torch.ones(2, 4)).dtype == torch.float32
    with engine.autocast():
        assert net(torch.ones(2, 4)).dtype == torch.bfloat16
    assert net.seen_dtypes == [torch.bfloat16] * 2
    net.mark_forward_method("encode")
    assert net.encode(torch.ones(2, 4)).dtype == torch.float32
    with torch.no_grad():
        assert net(torch.ones(2, 4)).dtype == torch.float32


def test_a_forward_after_backward_sees_weights_that_were_moved_by_hand():
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    net = engine.setup(Net())
    with engine.autocast():
        engine.backward(net(torch.ones(2, 4)).float().mean())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert not net(torch.ones(2, 4)).any()


def test_double_precision_takes_batches_and_noise_of_any_dtype():
    engine = Engine(accelerator="cpu", precision="64-true")
    net, _, loader = prepared(engine)
    assert next(iter(loader))[0].dtype == net(torch.ones(2, 4)).dtype == torch.float64
    with engine.autocast():
        assert torch.randn(1).dtype == torch.float64


def test_scaled_losses_leave_steps_out_that_overflow():
    engine = Engine(accelerator="cpu", precision="16-mixed")
    net, optimizer, loader = prepared(engine)
    before = copy.deepcopy(net.state_dict())
    batches = iter(loader)
    engine.backward(net.loss(*next(batches)) * float("inf"))
    norm = engine.clip_gradients(optimizer, max_norm=1.0)
    optimizer.step()
    assert engine.num_skipped_steps == 1 and not norm.isfinite()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    optimizer.zero_grad()
    train(engine, net, optimizer, batches)
    assert engine.num_skipped_steps < 1 + 4  # until the scale fits
    assert not torch.equal(net.first.weight, before["first.weight"])


def test_lbfgs_steps_with_a_closure_as_by_hand(engine):
    def fit(net, optimizer, backward):
        x, y = data().tensors

        def closure():
            optimizer.zero_grad()
            loss = net.loss(x, y)
            backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return net.state_dict()

    torch.manual_seed(1)
    plain = Net()
    net = copy.deepcopy(plain)
    net, optimizer = engine.setup(net, torch.optim.LBFGS(net.parameters(), max_iter=4))
    expected = fit(plain, torch.optim.LBFGS(plain.parameters(), max_iter=4), torch.Tensor.backward)
    found = fit(net, optimizer, engine.backward)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with pytest.raises(ConfigError, match=r"LBFGS.step must get a closure"):
        optimizer.step()


# --- loaders ---------------------------------------------------------------------------------------------------------


def test_each_iteration_reads_the_epoch_that_a_trainer_reads(engine):
    class Reader(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer, self.read = nn.Linear(4, 1), []

        def training_step(self, batch):
            self.read.append(batch[0])
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    seed_everything(3, verbose=False)
    module = Reader()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet).fit(
        module, DataLoader(data(), 3, shuffle=True)
    )
    seed_everything(3, verbose=False)
    loader = engine.setup_dataloaders(DataLoader(data(), 3, shuffle=True))
    assert len(loader) == loader.num_steps == 7 and loader.global_batch_size == 3
    read = [x for _epoch in range(2) for x, _ in loader]
    assert loader.epoch == 2 and loader.batch_size == 1
    assert len(read) == len(module.read)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, module.read, strict=True))


def test_a_loop_inside_another_gives_the_outer_its_batch_back(engine):
    net, optimizer, loader = prepared(engine, accumulate_grad_batches=3)
    val = engine.setup_dataloaders(DataLoader(data(6), 2))
    twin = copy.deepcopy(net)
    by_hand = torch.optim.AdamW(twin.parameters(), lr=0.05)
    batches = list(loader)
    loader.epoch = 0
    for index, (x, y) in enumerate(loader):
        with torch.no_grad():
            values = [engine.reduce(net.loss(*batch)).item() for batch in islice(val, 2 if index % 2 else None)]
        assert len(values) == (2 if index % 2 else 3)
        engine.backward(net.loss(x, y))
        if engine.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    for window in (batches[:3], batches[3:]):
        size = sum(len(x) for x, _ in window)
        for x, y in window:
            (twin.loss(x, y) * (len(x) / size)).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in twin.state_dict().items())


def test_gradients_of_own_batches_add_up_as_by_hand_and_losses_with_counts_by_these(engine):
    torch.manual_seed(2)
    net = engine.setup(Net())
    optimizer = engine.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = data().tensors
    for is_last in (False, True):
        part = slice(5, None) if is_last else slice(5)
        with engine.no_backward_sync(net, enabled=not is_last):
            errors = (net(x[part]) - y[part]).square()
            engine.backward(Loss(errors.sum(), errors.numel()))
    norm = engine.clip_gradients(optimizer, max_norm=1e9)
    mean = torch.autograd.grad(net.loss(x, y), list(net.parameters()))
    for gradient, parameter in zip(mean, net.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(mean))
    optimizer.step()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_run_that_was_loaded_goes_on_to_the_bit(engine, tmp_path):
    net, optimizer, loader = prepared(engine, accumulate_grad_batches=2)
    state = {"model": net, "optimizer": optimizer, "loader": loader, "step": 4, "note": "middle"}
    batches = iter(loader)
    train(engine, net, optimizer, islice(batches, 2))
    torch.manual_seed(8)
    engine.save(tmp_path / "a.ckpt", state)
    noise = torch.rand(1)
    rest = train(engine, net, optimizer, batches) + train(engine, net, optimizer, loader)

    other = Engine(accelerator="cpu")
    net2, optimizer2, loader2 = prepared(other, accumulate_grad_batches=2)
    loaded = {"model": net2, "optimizer": optimizer2, "loader": loader2, "step": 0}
    assert other.load(tmp_path / "a.ckpt", loaded) == {"note": "middle"}
    assert loaded["step"] == 4 and torch.equal(torch.rand(1), noise)
    again = train(other, net2, optimizer2, loader2) + train(other, net2, optimizer2, loader2)
    assert again == rest and len(rest) == 3 + 5
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in net2.state_dict().items())


def test_weights_go_from_an_engine_to_load_weights_and_from_a_trainer_to_an_engine(engine, tmp_path):
    net, optimizer, _ = prepared(engine)
    engine.save(tmp_path / "a.ckpt", {"model": net, "optimizer": optimizer})
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in load_weights(tmp_path / "a.ckpt").items())

    class Module(TrainModule):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

        def training_step(self, batch):
            return self.second(self.first(batch)).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    module = Module()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(module, DataLoader(torch.ones(4, 4)))
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    rest = engine.load(tmp_path / "b.ckpt", {"model": net})
    assert torch.equal(net.first.weight, module.first.weight) and rest["loop"]["global_step"] == 4


def test_what_does_not_fit_is_said_by_its_name(engine, tmp_path):
    net, optimizer, loader = prepared(engine)
    path = tmp_path / "a.ckpt"
    engine.save(path, {"model": net, "step": 1})
    with pytest.raises(CheckpointError, match=r"no part 'optimizer', but \['model', 'step'\]"):
        engine.load(path, {"optimizer": optimizer})
    with pytest.raises(CheckpointError, match=r"part 'model' of the checkpoint does not fit Linear"):
        engine.load(path, {"model": engine.setup(nn.Linear(2, 2))})
    with pytest.raises(ConfigError, match=r"got 'rng'"):
        engine.save(path, {"rng": 1})
    with pytest.raises(CheckpointError, match=r"does not exist"):
        engine.load(tmp_path / "b.ckpt")
    batches = iter(loader)
    batch = next(batches)
    with pytest.raises(RunError, match=r"inside an optimizer step"):
        engine.save(path, {"loader": loader})
    engine.save(path, {"model": net})
    engine.backward(net.loss(*batch))
    with pytest.raises(RunError, match=r"inside an optimizer step"):
        engine.save(path, {"model": net})


# --- wrong use -------------------------------------------------------------------------------------------------------


def test_a_backward_before_setup_or_beside_it_is_an_error(engine):
    net, loss = Net(), lambda net: net(torch.ones(2, 4)).sum()
    with pytest.raises(RunError, match=r"none of the 0 has computed"):
        engine.backward(loss(net))
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RunError, match=r"none of the 1 has computed"):
        engine.backward(net.encode(torch.ones(2, 4)).sum())
    with pytest.raises(RunError, match=r"step\(\) of SGD was called without engine.backward"):
        optimizer.step()
    loss(net).backward()
    with pytest.raises(RunError, match=r"clip_gradients of SGD was called without engine.backward"):
        engine.clip_gradients(optimizer, max_norm=1.0)
    engine.backward(loss(net))
    optimizer.step()
    with pytest.raises(RunError, match=r"without engine.backward\(loss\) since its last step"):
        optimizer.step()
    with engine.no_backward_sync():
        engine.backward(loss(net))
    with pytest.raises(RunError, match=r"inside an accumulation"):
        optimizer.step()
    with pytest.raises(ModuleError, match=r"shape \(2, 1\)"):
        engine.backward(net(torch.ones(2, 4)))
    with pytest.raises(ConfigError, match=r"got None"):
        engine.backward(None)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # as torch 2.11 imports its compiler
def test_modules_and_optimizers_are_set_up_once_and_together(engine):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"must get a torch.nn.Module first, got SGD"):
        engine.setup(optimizer, net)
    with pytest.raises(ModuleError, match=r"4 of 4 parameters of SGD do not belong to Net"):
        engine.setup(Net(), optimizer)
    with pytest.raises(ConfigError, match=r"torch optimizers after the module, got .*a StepLR"):
        engine.setup(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    _, managed = engine.setup(net, optimizer)
    with pytest.raises(ConfigError, match=r"Net was set up before"):
        engine.setup(net)
    with pytest.raises(ConfigError, match=r"was set up before"):
        Engine(accelerator="cpu").setup(Net(), managed)
    with pytest.raises(ConfigError, match=r"that was passed to engine.setup alone"):
        engine.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"SGD was not set up by this engine"):
        engine.clip_gradients(torch.optim.SGD(Net().parameters(), lr=0.1), max_norm=1.0)
    with pytest.raises(ConfigError, match=r"one of max_norm and clip_val"):
        engine.clip_gradients(managed)
    with pytest.raises(ConfigError, match=r"a limit of at least 0, got -1.0"):
        engine.clip_gradients(managed, max_norm=-1.0)
    with pytest.raises(ModuleError, match=r"mark_forward_method\('decode'\)"):
        net.mark_forward_method("decode")
    with pytest.raises(ConfigError, match=r"inside torch.compile"):
        engine.setup(torch.compile(Net()))


@pytest.mark.parametrize("strategy", ["local_sgd", "elastic", "dp", "pp"])
def test_a_strategy_that_needs_the_trainers_loop_is_refused(strategy):
    with pytest.raises(ConfigError, match=rf"strategy='{strategy}' needs the Trainer's loop"):
        Engine(strategy=strategy, accelerator="cpu", devices=2)


def test_processes_are_started_by_launch_alone():
    engine = Engine(strategy="ddp", accelerator="cpu", devices=2)
    with pytest.raises(RunError, match=r"has not started its 2 processes"):
        engine.setup(Net())
    with pytest.raises(ConfigError, match=r"must get a function where strategy='ddp' starts 2 processes, got None"):
        engine.launch()
    for setting, value in (("accumulate_grad_batches", 0), ("global_batch_size", 1.5)):
        with pytest.raises(ConfigError, match=rf"{setting} must be an int of at least 1"):
            Engine(accelerator="cpu").setup_dataloaders([], **{setting: value})
