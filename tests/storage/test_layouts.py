"""Runs of several processes that share nothing but a bucket: each rank saves and reads its own blocks."""

import os
import signal
from functools import partial

import pytest
import torch
from store_program import Net, data
from sweep import IS_SWEEP
from torch import nn

from echelon import Callback, ElasticStrategy, ModelCheckpoint, ParallelStrategy, Trainer, seed_everything
from echelon.trainer.checkpoint import list_checkpoints, verify

pytestmark = pytest.mark.slow

LAYOUTS = {
    "single": (1, lambda: "single"),
    "ddp": (2, lambda: "ddp"),
    "fsdp": (2, lambda: "fsdp"),
    "pp": (2, partial(ParallelStrategy, pp=2, schedule="gpipe")),
    "pp x fsdp": (4, partial(ParallelStrategy, pp=2, dp_shard=2, schedule="gpipe")),
}


class Staged(Net):
    """The network in layers that a pipeline can cut."""

    def __init__(self, width=64):
        super().__init__(width)
        sizes = (4, width), (width, width), (width, 1)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(n, m), nn.Tanh()) for n, m in sizes))


def fit(layout, steps, folder, *callbacks, ckpt_path=None, module=None, keeps=2):
    """Train and return the weights."""
    devices, make = LAYOUTS[layout]
    seed_everything(0)
    module = Staged() if module is None else module
    save = ModelCheckpoint(folder, monitor="step", mode="max", every_n_train_steps=2, save_last=True, save_top_k=keeps)
    trainer = Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        max_epochs=-1,
        global_batch_size=4,
        callbacks=[save, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS if IS_SWEEP else ("pp",))  # two nodes have fsdp
def test_a_layout_saves_to_a_bucket_resumes_there_and_on_another_one(layout, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = fit(layout, 6, tmp_path / "local")
    fit(layout, 4, f"{bucket}/runs")
    found = list_checkpoints(f"{bucket}/runs")
    assert [one.path.name.partition("step=")[2] for one in found] == ["2.ckpt", "4.ckpt"]
    for one in found:
        verify(one.path)
    resumed = fit(layout, 6, f"{bucket}/runs", ckpt_path="last")
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    other = "single" if layout != "single" else "fsdp"
    elsewhere = fit(other, 6, f"{bucket}/other", ckpt_path=str(found[-1].path))
    for name in expected:
        torch.testing.assert_close(elsewhere[name], expected[name])
    assert len(list_checkpoints(f"{bucket}/runs")) == 2


class DiesOnce(Callback):
    """Kills a rank in the first round, once a checkpoint was saved."""

    def on_train_step_end(self, trainer, module):
        number = trainer.strategy.launcher.supervisor.round.number
        if trainer.global_step == 5 and trainer.strategy.rank == 1 and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_an_elastic_run_goes_on_from_the_bucket_when_a_worker_was_killed(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LAYOUTS["elastic"] = (2, partial(ElasticStrategy, "ddp", snapshot_every=None))
    expected = fit("ddp", 8, tmp_path / "local")
    weights = fit("elastic", 8, f"{bucket}/runs", DiesOnce())
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name])
    found = list_checkpoints(f"{bucket}/runs")
    assert [one.path.name.partition("step=")[2] for one in found] == ["6.ckpt", "8.ckpt"]


def test_a_resume_reads_little_more_than_its_bytes(proxy, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wide = partial(Staged, 1500)
    fit("fsdp", 2, f"{bucket}/runs", module=wide())
    (one,) = list_checkpoints(f"{bucket}/runs")
    size = sum(file.size for file in one.manifest.files.values())
    assert size > 20 << 20
    proxy.reset_counts()
    fit("fsdp", 3, tmp_path / "local", ckpt_path=f"{bucket}/runs/last.ckpt", module=wide())
    requests = proxy.reset_counts()
    read = sum(request.received for request in requests if request.method == "GET")
    assert size * 0.95 <= read <= size * 1.05, (read / size, len(requests))
