"""What libraries call beside Fabric: throughput, FLOPs, files read when they are used, modules without values."""

import importlib
import warnings

import pytest
import torch
from torch import nn

import echelon
from echelon.lightning.stand_in import module_of


def of(framework, path):
    """Return one of Lightning's modules, of the framework."""
    if framework.__name__ == "lightning":
        return importlib.import_module(f"lightning.{path}")
    return module_of(f"lightning.{path}", "stands_in")


def fabric_of(framework, **options):
    return of(framework, "fabric").Fabric(accelerator="cpu", devices=1, **options)


def test_throughput_has_lightnings_numbers(framework):
    utilities = of(framework, "fabric.utilities.throughput")
    one = utilities.Throughput(available_flops=100, world_size=2, window_size=3, separator="|")
    for step in range(1, 5):
        one.update(time=step / 2, batches=2 * step, samples=6 * step, lengths=12 * step, flops=7 * step)
        if step == 1:
            assert one.compute() == {"time": 0.5, "batches": 2, "samples": 6, "lengths": 12}
    device = {"batches_per_sec": 4.0, "samples_per_sec": 12.0, "items_per_sec": 24.0, "flops_per_sec": 49.0}
    of_device = {f"device|{name}": value for name, value in device.items()}
    both = {name: 2 * value for name, value in device.items()}
    totals = {"time": 2.0, "batches": 8, "samples": 24, "lengths": 48}
    assert one.compute() == pytest.approx({**totals, **of_device, **both, "device|mfu": 0.49})
    for wrong in ({"time": 2.0}, {"batches": 50}, {"lengths": 1}):
        with pytest.raises(ValueError, match=r"grow|increase|at least|greater"):
            one.update(**{"time": 9.0, "batches": 9, "samples": 27, "lengths": 54, **wrong})
    one.reset()
    one.update(time=0.1, batches=1, samples=1)
    assert one.compute() == {"time": 0.1, "batches": 1, "samples": 1}


def test_a_fabrics_speed_is_logged_and_the_flops_of_a_module_counted(framework, tmp_path):
    logger = of(framework, "fabric.loggers").CSVLogger(root_dir=tmp_path, name="speed", flush_logs_every_n_steps=1)
    fabric = fabric_of(framework, loggers=[logger])
    fabric.launch()
    monitor = of(framework, "fabric.utilities").ThroughputMonitor(fabric, window_size=2)
    for step in (1, 2):
        monitor.update(time=float(step), batches=step, samples=2 * step)
        monitor.compute_and_log()
    logger.finalize("success")
    (table,) = tmp_path.rglob("metrics.csv")
    names, *rows = [line.split(",") for line in table.read_text().splitlines()]
    assert dict(zip(names, rows[-1], strict=True))["device/samples_per_sec"] == "2.0"
    with torch.device("meta"):
        module, x = nn.Linear(4, 3), torch.randn(2, 4)
    measure = of(framework, "fabric.utilities.throughput").measure_flops
    assert measure(module, lambda: module(x)) == 2 * 2 * 4 * 3
    assert measure(module, lambda: module(x), torch.sum) == 2 * 2 * 2 * 4 * 3


def test_modules_are_built_without_values_and_given_them_later(framework):
    fabric = fabric_of(framework)
    torch.manual_seed(0)
    with fabric.init_module(empty_init=True):
        nn.Linear(4, 4)
    assert torch.equal(torch.rand(2), torch.manual_seed(0) and torch.rand(2))  # nothing was drawn
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
    materialize = of(framework, "fabric.utilities.init")._materialize_meta_tensors
    materialize(module, torch.device("cpu"))
    assert module[2].running_var.tolist() == [1.0] * 4 and module(torch.ones(2, 4)).isfinite().all()
    with torch.device("meta"):
        bare = nn.Module()
        bare.weight = nn.Parameter(torch.ones(1))
    with pytest.raises((echelon.ModuleError, TypeError), match="reset_parameters"):
        materialize(bare, torch.device("cpu"))


def test_files_are_read_when_they_are_used(framework, tmp_path):
    load = of(framework, "fabric.utilities.load")._lazy_load
    value = torch.arange(6.0).reshape(2, 3)
    torch.save({"model": {"w": value, "b": nn.Parameter(value[0])}, "step": 3}, tmp_path / "model.pth")
    read = load(tmp_path / "model.pth")
    assert read["step"] == 3 and torch.equal(torch.add(read["model"]["w"], 1), value + 1)
    assert read["model"]["b"].requires_grad
    with pytest.raises(FileNotFoundError, match="nothing"):
        load(tmp_path / "nothing")


def test_a_fabrics_checkpoint_is_one_file_for_torch_load(framework, tmp_path):
    def made():
        fabric = fabric_of(framework)
        fabric.launch()
        module = nn.Linear(2, 1)
        return fabric, *fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))

    torch.manual_seed(0)
    fabric, module, optimizer = made()
    fabric.backward(module(torch.ones(1, 2)).sum())
    optimizer.step()
    fabric.save(tmp_path / "one.ckpt", {"model": module, "optimizer": optimizer, "step": 3, "names": ("a", "b")})
    opened = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert opened.keys() == {"model", "optimizer", "step", "names"} and opened["step"] == 3
    assert opened["model"].keys() == {"weight", "bias"}
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    plain.load_state_dict(opened["optimizer"])
    assert plain.state_dict()["state"].keys() == {0, 1} and plain.param_groups[0]["lr"] == 0.1
    other, loaded, again = made()
    into = {"model": loaded, "optimizer": again, "step": 0}
    assert other.load(tmp_path / "one.ckpt", into).keys() == {"names"} and into["step"] == 3
    assert torch.equal(loaded.weight, module.weight)
    other.load_raw(tmp_path / "one.ckpt", loaded) if framework.__name__ != "lightning" else None


def test_a_loop_may_save_after_it_has_left_its_loader(framework, tmp_path):
    class Loader(torch.utils.data.DataLoader):
        def state_dict(self):
            return {}

    fabric = fabric_of(framework)
    fabric.launch()
    module = nn.Linear(2, 1)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(Loader(torch.ones(8, 2), batch_size=2))
    batches = iter(loader)
    for number, batch in enumerate(batches):
        if number == 2:
            break
        fabric.backward(module(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fabric.save(tmp_path / "left.ckpt", {"model": module, "loader": loader})
    assert (tmp_path / "left.ckpt").is_file()
    if framework.__name__ != "lightning":
        assert any("skips that batch" in str(one.message) for one in told)
