"""A server or trainer that dies or stops ends the run in seconds; resuming from its last checkpoint loses nothing."""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    ModelCheckpoint,
    ModuleError,
    ParameterServerStrategy,
    ProcessError,
    RemoteEmbedding,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.strategies.distributed.pickling import pack_value, unpack_value
from echelon.strategies.placed.on_servers import PlacedOnServers
from echelon.strategies.servers import connection
from echelon.strategies.servers.server import run_server

SECONDS = 60.0  # 0.1 to 1 on a quiet machine; what nothing ends would continue for minutes
DIES_AT = 7
LATER = 240.0  # for what does not come if the test fails


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.table, self.head = RemoteEmbedding(20, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.table(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


def wait_for(look):
    """Return what `look` returns, once there is something."""
    end = time.monotonic() + LATER
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def children(pid):
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended since
            found += map(int, file.read_text().split())
    return found


class Tell(Callback):
    """Reports the process of each rank at some moment; each then continues when it is told to."""

    def __init__(self, folder, moment):
        self.folder, self.moment = folder, moment

    def tell(self, trainer, moment):
        if moment == self.moment:
            part, file = (self.folder / f"{trainer.strategy.rank}.{kind}" for kind in ("part", "pid"))
            part.write_text(str(os.getpid()))
            part.rename(file)
            wait_for((self.folder / "go").exists)

    def setup(self, trainer, module, stage):
        self.tell(trainer, "start")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == DIES_AT:
            self.tell(trainer, "pull")

    def on_after_backward(self, trainer, module):
        if trainer.global_step == DIES_AT:
            self.tell(trainer, "push")

    def on_train_end(self, trainer, module):
        self.tell(trainer, "shutdown")


class TellingModule(PlacedOnServers):
    """Also reports when it is saved."""

    def optimizer_state(self, optimizer):
        trainer = self.module.trainer
        if trainer.global_step > 5:
            next(each for each in trainer.callbacks if isinstance(each, Tell)).tell(trainer, "save")
        return super().optimizer_state(optimizer)


class Telling(ParameterServerStrategy):
    def make_placed(self, module, *, is_manual=False):
        placed = super().make_placed(module, is_manual=is_manual)
        placed.__class__ = TellingModule
        return placed


class Killer(threading.Thread):
    """Stops a server or rank 1 at the moment, and ends it once the others wait for it."""

    def __init__(self, victim, moment, folder, is_killed):
        super().__init__(daemon=True)
        self.victim, self.moment, self.folder, self.is_killed = victim, moment, folder, is_killed
        self.go, self.time = folder / "go", 0.0

    def run(self):
        files = [self.folder / f"{rank}.pid" for rank in range(2)]
        pids = [int(wait_for(lambda file=file: file.exists() and file.read_text())) for file in files]

        def server():
            return next((child for nursery in children(pids[0]) for child in children(nursery)), None)

        if self.moment == "start":  # no server exists yet, for which all of them would wait
            self.go.touch()
            self.end(pids[1] if wait_for(server) and self.victim == "trainer" else server())
        else:
            victim = pids[1] if self.victim == "trainer" else server()
            os.kill(victim, signal.SIGSTOP)
            self.go.touch()
            time.sleep(0.3 if self.is_killed else 0)
            self.end(victim)

    def end(self, pid):
        self.time = time.time()
        os.kill(pid, signal.SIGKILL if self.is_killed else signal.SIGSTOP)


def fit(folder, *callbacks, strategy=None, ckpt_path=None, devices=2, module=None):
    """Train, and return the weights."""
    seed_everything(4, verbose=False)
    module = Net() if module is None else module
    data = TensorDataset(torch.randint(20, (24, 3), generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        strategy=strategy or ParameterServerStrategy(),
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=2,
        default_root_dir=folder,
        callbacks=[*callbacks, ModelCheckpoint(folder, every_n_train_steps=5, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 2, shuffle=True), ckpt_path=ckpt_path)
    return module.state_dict()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"))


def end_of(folder, victim, moment, *, is_killed=True, **choices):
    """Return the error of a run one of whose processes is ended at some moment, and after how many seconds it came."""
    killer = Killer(victim, moment, folder, is_killed)
    killer.start()
    with pytest.raises(ProcessError) as caught:
        fit(folder, Tell(folder, moment), strategy=Telling(**choices))
    took = time.time() - killer.time
    print(f"{victim}, {moment}: {took:.2f} s")
    return str(caught.value), took


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("moment", "victim"), dealt(["start", "pull", "push", "save", "shutdown"], ["server", "trainer"], [0])
)
def test_a_death_ends_the_run_in_seconds_and_the_run_goes_on_from_its_checkpoint(victim, moment, tmp_path, undisturbed):
    text, took = end_of(tmp_path, victim, moment, dense="ddp" if moment == "pull" else "servers")
    assert took < SECONDS
    assert ("Server 0 of 1" if victim == "server" else "Rank 1 of 2") in text
    assert "was killed by SIGKILL" in text
    resumed = fit(tmp_path, ckpt_path="last")
    for name, value in undisturbed.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [pytest.param("server", "start", marks=pytest.mark.only_in_sweep), ("server", "push"), ("trainer", "push")],
)
def test_who_stops_and_does_not_go_on_is_named(victim, moment, tmp_path):
    text, took = end_of(tmp_path, victim, moment, is_killed=False, answer_timeout=timedelta(seconds=1))
    assert took < SECONDS
    assert ("Server 0 of 1" if victim == "server" else "Rank 1 of 2 does not answer") in text


class Fails(Net):
    """Fails somewhere; a "server" is lost."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def fail(self, here):
        if here == self.place == "server":
            self.trainer.strategy.rpc_async("server0", os._exit, (3,))
        elif here == self.place:
            raise ValueError("as the test wants")

    def on_fit_start(self):
        self.fail("on_fit_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 6:
            self.fail("server")
            self.fail("on_train_batch_end")

    def on_fit_end(self):
        self.fail("on_fit_end")

    def teardown(self, stage):
        self.fail("teardown")


def test_one_process_trains_again_after_each_failure_with_its_table_or_the_advice_to_load_it(tmp_path):
    for place in ("on_fit_start", "on_train_batch_end", "on_fit_end", "teardown"):
        module = Fails(place)
        with pytest.raises(ValueError, match="as the test wants"):
            fit(tmp_path / place, strategy=ParameterServerStrategy(dense="ddp"), devices=1, module=module)
        assert module.table.weight.isfinite().all()
    module = Fails("server")
    with pytest.raises(ProcessError, match=r"Server 0 of 1 .* ended with exit code 3"):
        fit(tmp_path, strategy=ParameterServerStrategy(dense="ddp"), devices=1, module=module)
    with pytest.raises(ModuleError, match=r"'table' must have its table.*Load a checkpoint"):
        module.table(torch.tensor([1]))
    with pytest.raises(ModuleError, match=r"'table' must have its table"):
        fit(tmp_path / "again", strategy=ParameterServerStrategy(dense="ddp"), devices=1, module=module)
    module.place = ""
    last = {"ckpt_path": "last", "devices": 1, "module": module}
    resumed = fit(tmp_path, strategy=ParameterServerStrategy(dense="ddp"), **last)
    assert all(value.isfinite().all() for value in resumed.values())
    assert module.table(torch.tensor([1])).shape == (1, 4)


class ByValue:
    """A function that a process gets which cannot import it."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return unpack_value, (pack_value(self.function),)


def die_once_the_others_count_on_it(task):
    from torch.distributed import rpc

    rpc.TensorPipeAgent = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    run_server(task)


@pytest.mark.parametrize(
    ("function", "end"),
    [(os.abort, "ended with exit code 1"), (ByValue(die_once_the_others_count_on_it), "was killed by SIGKILL")],
)
def test_a_server_that_ends_before_the_others_know_it_ends_the_run(function, end, tmp_path):
    """os.abort takes no argument. In the other case torch's agent waits for a name, with Python's lock held."""

    class Broken(Callback):
        def setup(self, trainer, module, stage):
            connection.run_server = function
            self.begin = time.monotonic()

        def on_exception(self, trainer, module, exception):
            (tmp_path / "took").write_text(str(time.monotonic() - self.begin))

    with pytest.raises(ProcessError, match=f"Server 0 of 1 .* {end}"):
        fit(tmp_path, Broken())
    assert float((tmp_path / "took").read_text()) < SECONDS
