"""Training on a device beyond the matrix: names, launching, checkpoints, precisions, and copies to the host."""

import contextlib
import os
import time
import warnings
from functools import partial

import simulated_device
import torch
import torchmetrics
from device_matrix import DEVICE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    ActivationCheckpointing,
    Callback,
    ConfigError,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LearningRateFinder,
    LossSpikePolicy,
    MemoryReport,
    StragglerMonitor,
    ThroughputMonitor,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.strategies.devices.kinds import available_types, device_type_of
from echelon.strategies.devices.moves import move_module, move_tensor
from echelon.strategies.module import activation_offload
from echelon.testing import run_ranks
from echelon.trainer.savings.advisor import MEASURED, WARM_UP, TimeAdvisor


class Net(TrainModule):
    """Blocks with tied weights and, by choice, dropout."""

    def __init__(self, dropout=0.0, width=16, ties=True):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(3))
        )
        if ties:
            self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        return self.blocks(x)

    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Plain(Net):
    """The same, trained by SGD."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(number=48, **options):
    data = torch.randn(number, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(data.to(options.pop("dtype", torch.float64))), 8, **options)


def trainer_on(accelerator, **settings):
    quiet = {
        "strategy": "single",
        "devices": 1,
        "precision": "64-true",
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator=accelerator, **{**quiet, **settings})


def weights_of(module):
    return torch.cat([p.detach().flatten().double().cpu() for p in module.parameters()])


def fitted(accelerator, data=None, make=Net, ckpt_path=None, **settings):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    module = make()
    trainer = trainer_on(accelerator, **settings)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer, module


def far(module, other):
    return (weights_of(module) - weights_of(other)).abs().max().item()


def names():
    """Return what accelerators mean here, and the errors of those that are not here."""
    said = {}
    for name in ("xpu", "sym"):
        try:
            device_type_of(name)
        except ConfigError as error:
            said[name] = str(error)
    taken = {name: device_type_of(name) for name in ("auto", "cpu", DEVICE)}
    return taken, said, available_types(), str(trainer_on("auto").strategy)


def moves():
    """Return whether parameters of modules and tensors are the same objects after a move, and what is tied."""
    module = Net()
    weight = module.blocks[0][0].weight
    other = nn.Parameter(torch.ones(3))
    move_module(module, torch.device(DEVICE, 0))
    move_tensor(other, torch.device(DEVICE, 0))
    held = Net()
    weakly = {each: __import__("weakref").ref(each) for each in [held.blocks[0][0].weight]}
    move_module(held, torch.device(DEVICE, 0))
    return {
        "the same": weight is module.blocks[0][0].weight and weight.device.type == DEVICE,
        "tied": module.blocks[1][0].weight is weight,
        "tensor": other.device.type == DEVICE and other.is_leaf and other.requires_grad,
        "tied where one is held": held.blocks[1][0].weight is held.blocks[0][0].weight and len(weakly) == 1,
        "moved where one is held": all(p.device.type == DEVICE for p in held.parameters()),
    }


def launched(strategy):
    """Return how far the weights are that `fit` brings back from two processes that it starts itself."""
    make = partial(Net, ties=strategy != "fsdp")  # not between its units
    _, alone = fitted("cpu", make=make)
    _, module = fitted(DEVICE, make=make, strategy=strategy, devices=2, global_batch_size=8)
    return far(module, alone)


class Measured(Plain):
    """Blocks whose outputs objects of torchmetrics accumulate, one of them in a list."""

    def __init__(self):
        super().__init__()
        self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(batch[0].mean(1))
        self.all(batch[0].square().mean(1))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("all", self.all.compute().sum())
        self.all.reset()


def metric_objects(strategies):
    """Return how far metrics and weights of two processes on the device are from one's on the CPU."""
    alone, module = fitted("cpu", make=Measured)
    found = {}
    for strategy in strategies:
        trainer, there = fitted(DEVICE, make=Measured, strategy=strategy, devices=2, global_batch_size=8)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        apart = [abs(values[name] - float(value)) for name, value in alone.callback_metrics.items()]
        found[strategy] = max(*apart, far(there, module))
    return found


def checkpoints(folder):
    """Return how far runs are that go on elsewhere: from the device on the CPU, and back."""
    _, whole = fitted("cpu")
    found = {}
    for first, second in ((DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, DEVICE)):
        path = os.path.join(folder, f"{first}-{second}")
        trainer, _ = fitted(first, max_steps=3)
        trainer.save_checkpoint(path)
        _, resumed = fitted(second, ckpt_path=path)
        found[first == DEVICE, second == DEVICE] = far(resumed, whole)
    return found


def layouts(folder):
    """Return how far runs are that were saved in one layout and go on in another: on the device, and on the CPU."""
    make = partial(Net, ties=False)
    _, whole = fitted("cpu", make=make)
    found = {}
    for saved, resumed in ((("fsdp", DEVICE), ("single", "cpu")), (("single", "cpu"), ("ddp", DEVICE))):
        path = os.path.join(folder, saved[0])
        run_ranks(_save, 2, path, *saved) if saved[0] != "single" else _save(path, *saved)
        where = {} if resumed[0] == "single" else {"devices": 2, "strategy": resumed[0]}
        _, module = fitted(resumed[1], make=make, ckpt_path=path, global_batch_size=8, **where)
        found[saved[0], resumed[0]] = far(module, whole)
    return found


def _save(path, strategy, accelerator):
    settings = {"global_batch_size": 8, **({} if strategy == "single" else {"devices": "auto"})}
    trainer, _ = fitted(accelerator, make=partial(Net, ties=False), strategy=strategy, max_steps=3, **settings)
    trainer.save_checkpoint(path)


def resumed_with_dropout(folder):
    """Return how far a resumed run with dropout is from one that never stopped, and from one on the CPU."""
    path = os.path.join(folder, "dropout")
    _, whole = fitted(DEVICE, make=partial(Net, dropout=0.5))
    trainer, _ = fitted(DEVICE, make=partial(Net, dropout=0.5), max_steps=3)
    trainer.save_checkpoint(path)
    seed_everything(99, verbose=False)
    module = Net(dropout=0.5)
    trainer_on(DEVICE).fit(module, loader(), ckpt_path=path)
    _, without = fitted(DEVICE)
    return far(module, whole), far(module, without)


def precisions():
    """Return how far each precision is from the same on the CPU; fp16 is scaled."""
    found = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true"):
        data = loader(dtype=torch.float32)  # by SGD: Adam scales up the noise of gradients near zero
        ends = [fitted(place, data, Plain, precision=precision, max_steps=4)[1] for place in (DEVICE, "cpu")]
        found[precision] = far(*ends)
    return found


def refused_precision():
    module = torch.get_device_module(DEVICE)
    before, module.get_amp_supported_dtype = module.get_amp_supported_dtype, lambda: [torch.bfloat16]
    try:
        trainer_on(DEVICE, precision="16-mixed")
    except ConfigError as error:
        return str(error)
    finally:
        module.get_amp_supported_dtype = before
    return ""


@contextlib.contextmanager
def in_order(order):
    """Run copies late, or early where the device is simulated; and keep few bytes in flight, as if all were large."""
    before = activation_offload._IN_FLIGHT
    if is_simulated := DEVICE == "sim":
        simulated_device.library().set_early(order == "early")
    activation_offload._IN_FLIGHT = 2000
    try:
        yield
    finally:
        activation_offload._IN_FLIGHT = before
        if is_simulated:
            simulated_device.library().set_early(False)


def parts(order):
    """Return how far runs with each part are from those on the CPU; copies are late or early, as far as they may be."""
    cases = {
        "activation offload": lambda: {"activation_checkpointing": ActivationCheckpointing(offload=True)},
        "averaging": lambda: {"callbacks": [EMAWeightAveraging()]},
        "averaging on the CPU": lambda: {"callbacks": [EMAWeightAveraging(device="cpu")]},
        "spikes": lambda: {"callbacks": [LossSpikePolicy(warmup=2)]},
        "monitors": lambda: {"callbacks": [DeviceStatsMonitor(), StragglerMonitor(), ThroughputMonitor()]},
        "memory": lambda: {"callbacks": [MemoryReport()]},
        "a search for a rate": lambda: {"callbacks": [LearningRateFinder(num_training_steps=5, update_attr=False)]},
        "accumulation": lambda: {"accumulate_grad_batches": 2, "max_steps": 3},
        "clipping": lambda: {"gradient_clip_val": 0.01},
        "clipping by value": lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    }
    found = {}
    for name, settings in cases.items():
        with in_order(order):
            (_, here), (_, there) = fitted("cpu", **settings()), fitted(DEVICE, **settings())
        found[name] = far(here, there)
    with in_order(order):
        workers = fitted(DEVICE, data=loader(num_workers=1))[1]
    found["pinned by a worker"] = far(workers, fitted("cpu")[1])
    return found


def saved_while_training(folder, order):
    """Return how far each checkpoint that was written beside the steps is from the weights of its step."""

    class Keeping(Callback):
        def __init__(self):
            self.kept = {}

        def on_train_step_end(self, trainer, module):
            trainer.save_checkpoint(os.path.join(folder, str(trainer.global_step)))
            self.kept[trainer.global_step] = weights_of(module)  # which waits for the device: not before the copies

    keeping = Keeping()
    with in_order(order):
        fitted(DEVICE, callbacks=[keeping])
    found = []
    for step, weights in keeping.kept.items():
        loaded = Net.load_from_checkpoint(os.path.join(folder, str(step)), map_location="cpu")
        found.append((weights_of(loaded) - weights.float()).abs().max().item())
    return found


def predictions():
    """Return how far predictions are from the CPU's, and where they are."""
    seed_everything(3, verbose=False)
    module = Net().double()
    ends = [torch.cat(trainer_on(place).predict(module, loader())) for place in ("cpu", DEVICE)]
    return (ends[0] - ends[1].cpu()).abs().max().item(), {end.device.type for end in ends}


class Recurrent(Plain):
    """A recurrent layer, which keeps a list of its weights beside its parameters, and one that counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Identity()
        self.rnn, self.norm = nn.RNN(4, 6, batch_first=True), nn.BatchNorm1d(6, momentum=None)

    def forward(self, x):
        return self.norm(self.rnn(x.unflatten(1, (4, 4)))[0][:, -1])


def replicas():
    """Return how far two devices of one process are from two slices on the CPU: weights, and a buffer."""
    ends = [fitted(place, make=Recurrent, strategy="dp", devices=2)[1] for place in ("cpu", DEVICE)]
    return far(*ends), (ends[0].norm.running_mean - ends[1].norm.running_mean.cpu()).abs().max().item()


class SlowRows:
    """A logger that takes a while for each row, in which the device has nothing to do once it has been read."""

    name = version = None

    def log_metrics(self, metrics, step):
        time.sleep(0.01)

    def log_hyperparams(self, params):
        pass


def advice_of_logs(folder):
    """Return, by the interval of logs, what a run is advised to change, and how often its host has waited."""
    found, library = {}, simulated_device.library()
    for every in (1, 50):
        advisor = TimeAdvisor(seconds=0.0)
        steps = WARM_UP + MEASURED + 2
        settings = {"logger": SlowRows(), "log_every_n_steps": every, "callbacks": [advisor], "max_steps": steps}
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        library.taken_waits()
        library.count_waits(True)
        rows = DataLoader(TensorDataset(torch.ones(4 * steps, 16)), 4)
        Trainer(accelerator=DEVICE, devices=1, default_root_dir=folder, **settings, **quiet).fit(Plain(), rows)
        library.count_waits(False)
        found[every] = sorted(saving.kind for saving in advisor.savings), len(library.taken_waits())
    return found
