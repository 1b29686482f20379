"""Ordinary Lightning scripts, ported by changing only imports and class names, train, test and predict here.

Each ran under Lightning 2.6.6 first; the thresholds leave room below what it reached there.
"""

import csv
import math

import port_classifier
import port_datamodule
import port_gan
import pytest
import torch


@pytest.fixture
def run_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_classifier_learns_keeps_its_best_checkpoints_and_loads_them(run_in):
    argv = ["--root", str(run_in), "--hidden_dim", "32"]
    trainer, best, results, predictions = port_classifier.main(argv)
    assert trainer.global_step == 4 * math.ceil(1297 / 32)
    assert results[0]["test_acc"] > 0.85  # Lightning: 0.928
    assert predictions.shape == (250,)
    assert dict(best.hparams) == {"hidden_dim": 32, "learning_rate": 1e-2, "dropout": 0.1}

    version = run_in / "digits" / "version_0"
    kept = sorted(path.name for path in (version / "checkpoints").iterdir())
    assert len(kept) == 3 and kept[-1] == "last.ckpt"
    assert all(name.startswith("digits-epoch=") and "-val_acc=0." in name for name in kept[:2])
    with open(version / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"train_loss", "train_acc", "val_loss", "val_acc", "test_acc", "lr-Adam", "step", "epoch"} <= set(rows[0])
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert len(losses) == trainer.global_step // 10
    assert losses[-1] < losses[0] / 2


def test_the_data_module_feeds_every_stage_and_the_schedule_ends_with_the_run(run_in):
    trainer, before, after, tests, predictions = port_datamodule.main(str(run_in))
    assert trainer.global_step == 6 * (
        342 // 32
    )  # drop_last drops what fills no global batch; Lightning takes 66 steps
    assert after["val/rmse"] < 0.7 < before["val/rmse"]  # Lightning: 0.529 and 1.716
    first, second = tests
    assert first == {"test/mse/dataloader_idx_0": pytest.approx(second["test/mse/dataloader_idx_1"])}
    assert torch.cat(predictions).shape == (50,)
    assert trainer.datamodule.last_stage == "predict"
    assert len(list((run_in / "best").iterdir())) == 1


def test_the_gan_trains_both_networks_and_its_critic_runs_through_overridden_hooks(run_in):
    trainer, gan, history, epochs, critic_trainer, critic = port_gan.main(str(run_in))
    batches = 5 * math.ceil(1797 / 64)
    assert trainer.global_step == batches  # Lightning counts two for each batch
    assert len(history.losses) == batches
    assert history.started_on == "cpu"
    assert epochs == [0, 1, 2, 3, 4]
    assert gan.hparams.lr == 1e-4
    assert not any(parameter.requires_grad for parameter in gan.parameters())
    first, last = history.losses[0], history.losses[-1]
    assert all(math.isfinite(value) and value != first[name] for name, value in last.items())
    assert list((run_in / "tb" / "version_0").glob("events.out.tfevents*"))
    assert (run_in / "csv" / "version_0" / "metrics.csv").exists()

    assert critic.scheduler_calls == 3
    assert critic.last_val_epoch == 2
    assert critic.grad_norm > 0
    assert critic_trainer.callback_metrics["critic_acc"] > 0.9  # Lightning: 0.984
    assert critic_trainer.global_step == 3 * math.ceil(2 * 1797 / 64)
