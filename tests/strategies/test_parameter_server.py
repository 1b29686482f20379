"""Parameter servers beyond the matrix: schedulers, edits between steps, calls, sockets, bytes, bad input."""

import os
import socket
import struct
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    ConfigError,
    ElasticStrategy,
    ModuleError,
    ParameterServerStrategy,
    RemoteEmbedding,
    RunError,
    Trainer,
    TrainModule,
    seed_everything,
)

LISTEN = "0A"


class Busy(TrainModule):
    """Two optimizers, two schedulers, a layer that is frozen at first, and a hook that edits weights."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.late = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(4, 6)
        self.late.requires_grad_(False)
        self.never = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0]).tanh() + self.late(batch[0])).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                self.head.weight.clamp_(-0.3, 0.3)

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            self.late.requires_grad_(True)
            self.optimizers()[0].optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.05})

    def configure_optimizers(self):
        parts = [self.body, self.never], [self.head]
        first, second = ([p for part in group for p in part.parameters()] for group in parts)
        optimizers = torch.optim.AdamW(first, 0.02), torch.optim.SGD(second, 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.2, total_steps=20)
        return list(optimizers), [{"scheduler": schedule, "interval": "step"}]


def look_around(strategy):
    """Return what the user's calls give, and where the processes of the run listen."""
    with pytest.raises(ConfigError, match=r"to='server7' is not a peer.*trainer0, trainer1, server0, server1"):
        strategy.rpc_sync("server7", os.getpid)
    with pytest.raises(RunError, match="needs a running fit in async mode"):
        strategy.ledger()
    pids = [strategy.rpc_sync(f"server{index}", os.getpid) for index in range(2)]
    reference = strategy.remote("server1", torch.add, (torch.ones(2), 1))
    found = [strategy.rpc_async("server0", lambda x: x * 2, (torch.ones(2),)).wait(), reference.to_here()]
    return {"pids": pids, "found": found, "listening": listening([os.getpid(), *pids])}


def listening(pids):
    """Return the addresses at which processes listen."""
    inodes = {os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                found.add(socket.inet_ntoa(struct.pack("<I", int.from_bytes(raw, "big"))) if len(raw) == 4 else "::")
    return found


def fit(module, strategy, devices, batch_size, **settings):
    seed_everything(7, verbose=False)
    for layer in [layer for layer in module.modules() if hasattr(layer, "reset_parameters")]:
        layer.reset_parameters()
    data = TensorDataset(torch.randn(40, 4, dtype=torch.float64))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, DataLoader(data, batch_size, shuffle=True))
    return trainer


def is_running(pid):
    return Path(f"/proc/{pid}").exists()


def test_schedulers_edits_and_late_parameters_are_those_of_one_process():
    alone, served = Busy(), Busy()
    fit(alone, "single", 1, 8)
    trainer = fit(served, ParameterServerStrategy(2), 2, 4)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(served.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)
    assert trainer.global_step == 10


class Looking(Busy):
    """The same, and what it has seen is brought home as buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("pids", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("answers", torch.zeros(2, 2))
        self.register_buffer("is_loopback", torch.tensor(False))

    def on_train_end(self):
        if self.trainer.strategy.rank == 0:
            seen = look_around(self.trainer.strategy)
            self.pids += torch.tensor(seen["pids"])
            self.answers += torch.stack(seen["found"])
            self.is_loopback |= seen["listening"] == {"127.0.0.1"}


def test_the_users_calls_reach_named_peers_that_listen_on_loopback_and_are_gone_after_the_fit():
    module = Looking()
    strategy = ParameterServerStrategy(2)
    fit(module, strategy, 2, 4)
    assert module.answers.tolist() == [[2, 2], [2, 2]]
    assert module.is_loopback
    assert not any(map(is_running, module.pids.tolist()))
    with pytest.raises(RunError, match="rpc_sync needs a running fit"):
        strategy.rpc_sync("server0", os.getpid)


def test_one_trainer_has_servers_too():
    alone, served = Busy(), Busy()
    fit(alone, "single", 1, 8)
    fit(served, ParameterServerStrategy(), 1, 8)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(served.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


class Words(TrainModule):
    """A large table; a batch uses a few of its rows."""

    def __init__(self):
        super().__init__()
        self.table = RemoteEmbedding(20_000, 32, sparse=True)
        self.head = nn.Linear(32, 1)
        self.register_buffer("ratio", torch.zeros(()))
        self.rows = 0

    def training_step(self, batch, batch_idx):
        ids = (batch[0] * 1e6).long() % 20_000
        self.rows += ids.unique().numel()
        return self.head(self.table(ids)).square().mean()

    def on_train_end(self):
        traffic = getattr(self.trainer.strategy, "traffic", 0)
        self.ratio += traffic / (2 * self.rows * 32 * 8)  # each row is pulled, and its gradient pushed

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_remote_table_moves_the_rows_of_a_batch_and_comes_home():
    alone, served = Words(), Words()
    fit(alone, "single", 1, 8)
    fit(served, ParameterServerStrategy(dense="ddp"), 2, 4)
    torch.testing.assert_close(served.table.weight, alone.table.weight, rtol=0, atol=1e-12)
    assert 1.0 <= served.ratio < 1.2


class Million(TrainModule):
    """A table of a million rows; what travels is counted on all of this trainer's connections, by the kernel."""

    num_ids, size = 2048, 16

    def __init__(self):
        super().__init__()
        self.table = RemoteEmbedding(1_000_000, self.size, sparse=True)
        self.head = nn.Linear(self.size, 1)
        self.register_buffer("ratios", torch.zeros(2))
        self.rows = 0

    def training_step(self, batch, batch_idx):
        [seeds] = batch
        generator = torch.Generator().manual_seed(int(seeds[0]))
        ids = torch.randint(1_000_000, (self.num_ids,), generator=generator)
        self.rows += ids.unique().numel()
        return self.head(self.table(ids)).square().mean()

    def on_train_start(self):
        self.before = traffic_of_connections(), self.trainer.strategy.traffic

    def on_train_end(self):
        moved = self.rows * 2 * self.size * 4  # each row is pulled, and its gradient pushed
        for index, now in enumerate((traffic_of_connections(), self.trainer.strategy.traffic)):
            self.ratios[index] = (now - self.before[index]) / moved
        del self.before

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def traffic_of_connections():
    """Return the bytes that were sent and received by this process over TCP, as far as its sockets are open."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(file).startswith("socket:"):
                continue
            descriptor = os.dup(int(file.name))
        except FileNotFoundError:  # the entry of the folder itself
            continue
        with socket.socket(fileno=descriptor) as one:
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += sum(struct.unpack_from("QQ", info, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


def test_a_table_of_a_million_rows_moves_the_rows_of_a_batch_and_little_else():
    module = Million()
    data = TensorDataset(torch.arange(8))
    trainer = Trainer(
        strategy=ParameterServerStrategy(dense="ddp"),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 1))
    by_kernel, by_tensors = module.ratios.tolist()
    # on one machine processes may read tensors out of each other's memory, past their connections
    travelled = by_kernel + by_tensors if by_kernel < by_tensors else by_kernel
    assert 1.0 <= by_tensors < travelled <= 1.2


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"servers": 0}, "servers must be >= 1"),
        ({"servers": True}, "servers must be >= 1"),
        ({"servers": "all"}, "servers must be >= 1, or 'nodes'"),
        ({"mode": "asyncronous"}, "mode must be 'sync' or 'async', got 'asyncronous'. Did you mean 'async'"),
        ({"max_staleness": 2}, "max_staleness=2 needs mode='async'"),
        ({"mode": "async"}, "max_staleness must be >= 0 in async mode, got None"),
        ({"mode": "async", "max_staleness": -1}, "max_staleness must be >= 0"),
        ({"mode": "async", "max_staleness": 1, "dense": "ddp"}, "dense='ddp' needs mode='sync'"),
        ({"dense": "zero"}, "dense must be 'servers' or 'ddp', got 'zero'"),
        ({"dense": "fsdp"}, "dense must be 'servers' or 'ddp', got 'fsdp'"),
        ({"answer_timeout": timedelta(0)}, "answer_timeout must be a timedelta above zero"),
    ],
)
def test_choices_that_are_not_possible_are_refused_before_anything_starts(choices, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(strategy=ParameterServerStrategy(**choices), accelerator="cpu", devices=2, logger=False)


def test_what_does_not_go_with_servers_is_refused():
    strategy = ParameterServerStrategy(mode="async", max_staleness=3)
    with pytest.raises(ConfigError, match=r"precision='16-mixed'"):
        Trainer(strategy=strategy, accelerator="cpu", precision="16-mixed", logger=False)
    with pytest.raises(ConfigError, match="ps"):
        Trainer(strategy=ElasticStrategy(ParameterServerStrategy()), accelerator="cpu", logger=False)
    module = Busy()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="needs automatic optimization"):
        fit(module, "ps", 1, 8)
    with pytest.raises(ConfigError, match="at most the number of parameter tensors, got 9 for 8"):
        fit(Busy(), ParameterServerStrategy(9), 1, 8)
    with pytest.raises(ConfigError, match="at most the number of tables of RemoteEmbedding, got 1 for 0"):
        fit(Busy(), ParameterServerStrategy(dense="ddp"), 1, 8)


class Spiky(TrainModule):
    """Has gradients that overflow in the fourth step, from one sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("scales", torch.zeros(5))
        self.register_buffer("moved", torch.zeros(5))

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        return 1e-3 * outputs.square().mean() + 1e30 * (batch[0] > 1.5).any() * outputs.sum()

    def on_train_batch_start(self, batch, batch_idx):
        self.before = self.net[0].weight.detach().clone()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales[batch_idx] = self.trainer.scaler.get_scale()
        self.moved[batch_idx] = (self.net[0].weight != self.before).any()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def test_an_overflow_on_one_trainer_skips_the_step_of_all():
    """Only its share of the global batch overflows; the servers never see that step."""
    inputs = torch.rand(40, 4, generator=torch.Generator().manual_seed(2))
    inputs[25, 0] = 2.0

    def train(strategy, devices):
        seed_everything(7, verbose=False)
        module = Spiky()
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            precision="16-mixed",
            max_epochs=1,
            gradient_clip_val=1e-4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(inputs), 8 // devices))
        return module.state_dict()

    alone, served = train("single", 1), train(ParameterServerStrategy(2), 2)
    assert served["moved"].tolist() == alone["moved"].tolist()
    assert served["moved"][2:].tolist() == [1, 0, 1]
    assert served["scales"][3] == served["scales"][2] / 2
    for name, value in alone.items():
        torch.testing.assert_close(served[name], value, rtol=0, atol=1e-3, msg=name)


class Searching(Busy):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.head.parameters())


def test_an_optimizer_that_evaluates_the_loss_is_refused():
    with pytest.raises(ConfigError, match="does not work with LBFGS"):
        fit(Searching(), ParameterServerStrategy(), 1, 8)


class Averaged(torch.optim.SGD):
    """Has the parameters in a list of its own too, as wrappers of optimizers have."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.fast = self.param_groups[0]["params"]


class Locked(torch.optim.SGD):
    """Has what cannot be sent to a server."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.lock = threading.Lock()


class Trained(Busy):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        return self.kind(self.head.parameters())


class NotesErrors(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_exception(self, trainer, module, exception):
        (self.folder / f"{trainer.global_rank}").write_text(type(exception).__name__)


def test_an_optimizer_whose_parameters_would_be_others_on_a_server_is_refused():
    with pytest.raises(ConfigError, match=r"Averaged.fast holds parameters.*use param_groups, or use strategy='ddp'"):
        fit(Trained(Averaged), ParameterServerStrategy(), 1, 8)


def test_an_optimizer_that_cannot_be_sent_ends_every_rank_with_its_error(tmp_path):
    with pytest.raises(ConfigError, match=r"\(lock\) cannot be sent to other processes"):
        fit(Trained(Locked), ParameterServerStrategy(), 2, 4, callbacks=[NotesErrors(tmp_path)])
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "ConfigError", "1": "ConfigError"}


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_id_that_is_no_row_is_named(is_remote):
    layer = RemoteEmbedding(5, 2)
    if is_remote:
        layer.go_remote("RemoteEmbedding 'words'", lambda ids: torch.zeros(len(ids), 2))
        assert layer.weight.shape == (5, 2)
        assert layer.weight.untyped_storage().nbytes() == 4
    with pytest.raises(ModuleError, match=r"has rows 0 to 4, got id 5"):
        layer(torch.tensor([1, 5]))
    with pytest.raises(ModuleError, match=r"has rows 0 to 4, got id -1"):
        layer(torch.tensor([-1, 2]))
