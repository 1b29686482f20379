"""Fabric: loops written for Lightning's run over the Engine, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beside import data
from torch import nn

import echelon
import echelon.lightning as L

Fabric = L.Fabric


def fabric_of(framework: Any) -> Any:
    if framework.__name__ == "echelon":
        return Fabric
    import lightning.fabric

    return lightning.fabric.Fabric


def net() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return module


def loop(fabric: Any, accumulate: int = 1) -> Any:
    """Train two epochs; return the losses and the weights."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    module, optimizer, scheduler = fabric.setup(module, optimizer, scheduler=scheduler)
    loader = fabric.setup_dataloaders(data(16))
    losses = []
    for _ in range(2):
        for index, (x, y) in enumerate(loader):
            is_accumulating = (index + 1) % accumulate != 0
            with fabric.no_backward_sync(module, enabled=is_accumulating):
                loss = nn.functional.mse_loss(module(x), y)
                fabric.backward(loss / accumulate)
            losses.append(fabric.all_reduce(loss.detach()).item())
            if not is_accumulating:
                norm = fabric.clip_gradients(module, optimizer, max_norm=0.5)
                assert norm is not None and norm > 0
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    weights = [value.flatten().tolist() for value in module.state_dict().values()]
    return losses, weights


# what Lightning 2.6.6 gave: the last two losses, and the first weights
RECORDED = {
    (1, 1): [0.01497632, 0.01233566, -0.98360306, -0.69788879, -0.4498201, -0.16410586],
    (1, 2): [0.45495379, 0.72405398, -0.98874092, -0.70302665, -0.4109101, -0.12519583],
    (2, 1): [0.16094019, 0.58950388, -0.98874092, -0.70302665, -0.4109101, -0.12519582],
    (2, 2): [0.01302028, 0.07429155, -0.99530917, -0.70959491, -0.41509029, -0.12937599],
}


@pytest.mark.parametrize(("num_processes", "accumulate"), RECORDED)
def test_a_loop_has_lightnings_numbers(framework: Any, num_processes: int, accumulate: int) -> None:
    settings = {"strategy": "ddp_fork"} if num_processes > 1 else {}
    fabric = fabric_of(framework)(accelerator="cpu", devices=num_processes, **settings)
    losses, weights = fabric.launch(loop, accumulate) if num_processes > 1 else loop(fabric, accumulate)
    seen = [*losses[-2:], *weights[0][:4]]
    assert seen == pytest.approx(RECORDED[num_processes, accumulate], abs=1e-6)


def own() -> Any:
    return Fabric(accelerator="cpu", devices=1)


class Notes:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_epoch(self, epoch: int, *, loss: float = 0.0) -> None:
        self.calls.append((epoch, loss))

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        self.calls.append(type(module).__name__)


def test_callbacks_loggers_and_contexts_are_lightnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, rows = Notes(), []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: rows.append((metrics, step)))
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=notes, loggers=[logger], precision="bf16-true")
    module = fabric.setup_module(nn.Linear(2, 1))
    fabric.call("on_epoch", 3, loss=0.5, other=1)
    fabric.call("no_such_hook")
    fabric.log("loss", torch.tensor(0.5), step=2)
    fabric.log_dict({"a": 1, "b": torch.ones(())})
    assert notes.calls == ["Linear", (3, 0.5)] and fabric.logger is logger
    assert rows == [({"loss": 0.5}, 2), ({"a": 1, "b": 1.0}, None)]
    with fabric.init_tensor():
        assert torch.ones(1).dtype == torch.bfloat16
    with fabric.rank_zero_first(), fabric.rank_zero_first(local=True), fabric.autocast(), fabric.init_module(True):
        fabric.print("here")
    assert capsys.readouterr().out == "here\n" and module.weight.dtype == torch.bfloat16
    assert isinstance(fabric.accelerator, L.pytorch.accelerators.CPUAccelerator)
    assert (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size) == (0, 0, 0, 1)
    assert fabric.is_global_zero and fabric.device.type == "cpu" and fabric.strategy.root_device == fabric.device
    assert Fabric.seed_everything(3, workers=True, verbose=False) == 3
    fabric.barrier("end")
    first, second = fabric.setup_dataloaders(data(), data(), move_to_device=False)
    assert len(first) == len(second) == 4
    plugin = L.fabric.plugins.MixedPrecision("bf16-mixed", "cpu")
    assert Fabric(accelerator="cpu", devices=1, plugins=[plugin])._precision.name == "bf16-mixed"
    compiled = torch.compile(nn.Linear(2, 1), backend="eager")
    assert own().setup(compiled)(torch.ones(1, 2)).shape == (1, 1)


class Trained(Fabric):  # type: ignore[misc, valid-type]
    def run(self, factor: float) -> Any:
        rank = float(self.global_rank)
        gathered = self.all_gather({"x": torch.tensor([rank]), "n": rank})
        tensor = torch.tensor([rank + 1.0])
        total = self.all_reduce(tensor, reduce_op="sum")
        with self.rank_zero_first():
            pass
        sampler = torch.utils.data.DistributedSampler(range(8), 2, self.global_rank, shuffle=False)
        mine = self.setup_dataloaders(
            torch.utils.data.DataLoader(range(8), 2, sampler=sampler), use_distributed_sampler=False
        )
        seen = [batch.tolist() for batch in mine]
        return factor * total.item(), tensor.item(), gathered, self.broadcast(seen, 1), self.all_reduce(rank).item()


class Stepped(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def test_run_starts_the_processes_and_values_cross_them() -> None:
    total, tensor, gathered, seen, mean = Trained(accelerator="cpu", devices=2, strategy="ddp_fork").run(2.0)
    assert (total, tensor, mean) == (6.0, 3.0, 0.5)
    assert gathered["x"].tolist() == [[0.0], [1.0]] and gathered["n"].tolist() == [0.0, 1.0]
    assert seen == [[1, 3], [5, 7]]


def test_the_steps_of_a_module_go_through_the_strategy() -> None:
    fabric, notes = own(), Notes()
    fabric._callbacks.append(notes)
    module = Stepped()
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for index, batch in enumerate(fabric.setup_dataloaders(data())):
        fabric.backward(module.training_step(batch, index), model=module)
        optimizer.step()
        optimizer.zero_grad()
    assert notes.calls == ["Stepped"] and fabric._callbacks[-1] is module


def test_checkpoints_are_saved_filtered_and_loaded_also_those_of_lightning(tmp_path: Path) -> None:
    def made() -> Any:
        fabric, module = own(), net()
        return fabric, *fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))

    fabric, module, optimizer = made()
    fabric.backward(module(torch.ones(1, 2)).sum())
    optimizer.step()
    state = {"model": module, "optimizer": optimizer, "epoch": 3}
    fabric.save(tmp_path / "own", state)
    fabric.save(tmp_path / "weights", state, filter={"model": lambda name, value: "bias" not in name})
    assert list(echelon.load_weights(tmp_path / "weights")) == ["0.weight", "2.weight"]
    with pytest.raises(echelon.ConfigError, match="filter must name modules .*, got 'epoch'"):
        fabric.save(tmp_path / "x", state, filter={"epoch": lambda name, value: True})
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4, "rest": 1},
               tmp_path / "theirs.ckpt")  # fmt: skip
    torch.save(module.state_dict(), tmp_path / "raw.pt")
    for path, epoch, rest in ((tmp_path / "own", 3, {}), (tmp_path / "theirs.ckpt", 4, {"rest": 1})):
        other, loaded, again = made()
        into = {"model": loaded, "optimizer": again, "epoch": 0}
        assert other.load(path, into) == rest and into["epoch"] == epoch
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
        assert again.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
    for path in (tmp_path / "raw.pt", tmp_path / "own"):
        other, loaded, _ = made()
        other.load_raw(path, loaded)
        assert torch.equal(loaded[0].weight, module[0].weight)
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(echelon.CheckpointError, match="must be a file of torch.save with tensors"):
        fabric.load(tmp_path / "text", state)


def test_what_an_engine_cannot_do_is_refused_when_it_is_asked_for() -> None:
    fabric = own()
    module, optimizer = fabric.setup(*(lambda one: (one, torch.optim.SGD(one.parameters(), lr=0.1)))(net()))
    fabric.backward(module(torch.ones(1, 2)).sum() * float("inf"))
    for call, error, text in (
        (lambda: fabric.setup(net(), move_to_device=False), echelon.ConfigError, "needs move_to_device=True"),
        (lambda: fabric.clip_gradients(module, optimizer, max_norm=1.0, norm_type=1), echelon.ConfigError, "norm_type"),
        (lambda: fabric.clip_gradients(module, optimizer), echelon.ConfigError, "must get one of max_norm and clip"),
        (lambda: fabric.clip_gradients(module, optimizer, max_norm=1.0), echelon.RunError, "norm of the gradients is"),
        (lambda: fabric.all_reduce(1.0, group="g"), echelon.ConfigError, "needs group=None, got 'g'"),
        (lambda: fabric.logger, echelon.ConfigError, "fabric.logger needs a logger"),
        (lambda: Fabric(accelerator="cpu", devices=2, strategy="ddp").launch(), echelon.ConfigError, "get a function"),
        (lambda: Fabric(accelerator="cpu", strategy="deepspeed"), echelon.ConfigError, "deepspeed"),
        (lambda: Fabric(accelerator="cpu", plugins=["x"]), echelon.ConfigError, "plugins must hold launchers"),
    ):
        with pytest.raises(error, match=text):
            call()
