"""Lightning's callbacks and plugins that Echelon has none of its own for: they do what Lightning's do."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import data, net, trainer
from torch import nn
from torch.nn.utils import prune

import echelon
import echelon.lightning as L

OWN = L.pytorch.callbacks
PLUGINS = L.pytorch.plugins


def callbacks_of(framework: Any) -> Any:
    return framework if hasattr(framework, "ModelPruning") else OWN


def deep(pl: Any, **methods: Any) -> Any:
    module = net(pl, **methods)
    module.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for number, parameter in enumerate(module.net.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + 0.01 * number)
    return module


def rounded(tensor: Any) -> Any:
    return [round(value, 4) + 0.0 for value in tensor.detach().flatten().tolist()]


# what Lightning 2.6.6 gave
PRUNED: dict[str, tuple[dict[str, Any], Any]] = {
    "global": (
        {"pruning_fn": "l1_unstructured", "amount": 0.4, "use_lottery_ticket_hypothesis": False},
        [[-0.9963, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9963], [0.0, 0.0, 0.0, 0.8968]],
    ),
    "of each parameter": (
        {
            "pruning_fn": "l1_unstructured",
            "use_global_unstructured": False,
            "parameter_names": ["weight"],
            "amount": lambda epoch: 0.25 * (epoch + 1),
            "use_lottery_ticket_hypothesis": False,
        },
        [[-0.9948, -0.7091, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9948], [0.0, 0.0, 0.0, 0.859]],
    ),
    "structured": (
        {
            "pruning_fn": "ln_structured",
            "use_global_unstructured": False,
            "parameter_names": ["weight"],
            "pruning_dim": 1,
            "pruning_norm": 1,
            "amount": 1,
            "apply_pruning": lambda epoch: epoch == 1,
        },
        [[-1.0, 0.0, -0.4286, 0.0, 0.1429, 0.0, 0.7143, 0.0], [-0.98, 0.0, 0.3533, 1.02]],
    ),
}


@pytest.mark.parametrize("name", PRUNED)
def test_the_same_weights_are_pruned(framework: Any, name: str) -> None:
    arguments, expected = PRUNED[name]
    module = deep(framework)
    trainer(framework, max_epochs=2, callbacks=[callbacks_of(framework).ModelPruning(**arguments)]).fit(module, data())
    assert [rounded(module.net[0].weight), rounded(module.net[2].weight)] == expected


def adam(self: Any) -> Any:
    return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("is_permanent", [True, False])
def test_a_pruned_run_is_resumed_to_the_bit(is_permanent: bool, tmp_path: Path) -> None:
    def run(epochs: int, **fit: Any) -> Any:
        pruning = OWN.ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=is_permanent)
        saving = echelon.ModelCheckpoint(tmp_path / f"{is_permanent}", filename="{epoch}", save_top_k=-1)
        own = trainer(L, max_epochs=epochs, enable_checkpointing=True, callbacks=[pruning, saving])
        module = deep(L, configure_optimizers=adam)
        own.fit(module, data(), **fit)
        return own, module

    (_, straight), checkpoint = run(3), tmp_path / f"{is_permanent}" / "epoch=0.ckpt"
    weights = echelon.load_weights(checkpoint)
    assert ("net.0.weight" in weights) == is_permanent and ("net.0.weight_orig" in weights) != is_permanent
    own, resumed = run(3, ckpt_path=checkpoint)
    assert own.global_step == 12
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert hasattr(resumed.net[0], "weight_mask") != is_permanent
    assert (torch.cat([one.flatten() for one in straight.net[0].parameters()]) == 0).any() == is_permanent
    if is_permanent:
        plain = deep(L, configure_optimizers=adam)  # also without the callback, whose state is left out then
        trainer(L, max_epochs=2).fit(plain, data(), ckpt_path=checkpoint)
        trainer(L).validate(plain, data(), ckpt_path=checkpoint, verbose=False)


def test_all_ranks_prune_the_same_weights() -> None:
    module = deep(L)
    pruning = OWN.ModelPruning("random_unstructured", amount=0.5, parameter_names=["weight"])
    own = trainer(L, max_epochs=2, strategy="ddp_fork", devices=2, callbacks=[pruning])
    own.fit(module, data())
    weights = torch.cat([module.net[0].weight.flatten(), module.net[2].weight.flatten()])
    assert (weights == 0).sum() == 9 and list(module.state_dict()) == list(deep(L).state_dict())


def test_pruning_after_a_validation_leaves_masks_that_training_uses() -> None:
    module, kind = deep(L), OWN.ModelPruning
    pruning = kind("l1_unstructured", amount=0.2, parameter_names=["weight"], prune_on_train_epoch_end=False)
    trainer(L, max_epochs=3, num_sanity_val_steps=1, callbacks=[pruning]).fit(module, data(), data())
    assert (module.net[0].weight == 0).sum() + (module.net[2].weight == 0).sum() >= 5
    assert kind._is_pruning_method(prune.L1Unstructured) and not kind._is_pruning_method("l1")


def test_the_lottery_ticket_puts_first_values_back(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    class Pruning(OWN.ModelPruning):  # type: ignore[misc, name-defined]
        def apply_lottery_ticket_hypothesis(self) -> None:
            super().apply_lottery_ticket_hypothesis()
            seen.append([rounded(module.net[0].weight_orig), self._resample_parameters])

    for resamples in (False, True):
        module = deep(L)
        pairs = [(module.net[0], "weight")]
        pruning = Pruning(
            "l1_unstructured",
            pairs,
            amount=2,
            resample_parameters=resamples,
            verbose=2,
            use_lottery_ticket_hypothesis=lambda epoch: epoch == 1,
        )
        with caplog.at_level(logging.INFO):
            trainer(L, max_epochs=2, callbacks=[pruning]).fit(module, data())
    first = rounded(deep(L).net[0].weight)
    assert [one[1] for one in seen] == [False, True] and seen[0][0] == first != seen[1][0]
    assert "Applied `L1Unstructured`. Pruned: 2/8 (25.00%) -> 4/8 (50.00%)" in caplog.messages
    assert any("out_features=4, bias=True).weight` with amount=2. Pruned: 0 (0.00%) -> 2 (25.00%)" in one
               for one in caplog.messages)  # fmt: skip
    by_two = [OWN.ModelPruning(method, amount=1) for method in ("l1_unstructured", "random_unstructured")]
    trainer(L, max_epochs=1, callbacks=by_two).fit(deep(L), data())


def test_pruning_that_cannot_be_done_says_so() -> None:
    class Own(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

    other = nn.Linear(1, 1)
    for arguments, text in (
        ({"pruning_fn": "l1_unstructred"}, "got 'l1_unstructred'. Did you mean 'l1_unstructured'"),
        ({"pruning_fn": {}}, "expected to be a str in .*, got {}"),
        (
            {"pruning_fn": "random_structured", "use_global_unstructured": False},
            "`random_structured` pruning, the `pruning_dim` should be",
        ),
        (
            {"pruning_fn": "ln_structured", "pruning_dim": 0},
            "`ln_structured` pruning, the `pruning_norm` should be provided, got None",
        ),
        (
            {"pruning_fn": "random_structured", "pruning_dim": 0},
            "an unstructured method is supported with .*, got 'random_structured'",
        ),
        (
            {"pruning_fn": Own, "use_global_unstructured": False},
            "of your own .Own. is currently only supported with use_global_unstructured=True",
        ),
        ({"pruning_fn": "l1_unstructured", "parameter_names": ["x"]}, r"x isn't in .*, got \['x'\]"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, "verbose must be any of \\(0, 1, 2\\), got 3"),
        ({"pruning_fn": "l1_unstructured", "amount": "all"}, "amount must be a number or .*, got 'all'"),
        ({"pruning_fn": "l1_unstructured", "parameters_to_prune": [(other, "weight")]}, "which it lacks; take them"),
        ({"pruning_fn": "l1_unstructured", "parameters_to_prune": [other]}, "must be a list of .module, name"),
    ):
        with pytest.raises(echelon.ConfigError, match=text):
            trainer(L, callbacks=[OWN.ModelPruning(**arguments)]).fit(deep(L), data())
    with pytest.raises(echelon.ConfigError, match="needs whole parameters in each process, got strategy='fsdp'"):
        trainer(L, strategy="fsdp", devices=2, callbacks=[OWN.ModelPruning("l1_unstructured")]).fit(deep(L), data())


# --- spikes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "losses", "bad"),
    [
        ({}, [1.0, 1.0, 1.0, 5.0, 1.0], [2, 3]),
        ({"rtol": 10.0}, [1.0, 1.0, 1.0, 5.0, 1.0], []),
        ({"rtol": None, "atol": 0.5}, [1.0, 1.2, 1.8, 1.0], [1, 2]),
        ({"warmup": 4}, [1.0, 9.0, 1.0, 20.0, 1.0], []),
        ({"mode": "max"}, [5.0, 5.0, -9.0], [1, 2]),
        ({}, [1.0, float("nan"), 1.0], [0, 1]),
        ({"finite_only": False}, [1.0, float("nan"), 1.0, 5.0], [2, 3]),
    ],
)
def test_a_spike_ends_training_and_names_its_batches(
    framework: Any, arguments: dict[str, Any], losses: list[float], bad: list[int], tmp_path: Path
) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.net.weight.sum() * 0 + losses[batch_idx]

    pytest.importorskip("torchmetrics") if framework.__name__ != "echelon" else None
    spikes = callbacks_of(framework) if framework.__name__ == "echelon" else __import__(
        "lightning.pytorch.callbacks.spike", fromlist=["SpikeDetection"])  # fmt: skip
    detection = spikes.SpikeDetection(**arguments, exclude_batches_path=tmp_path / "skip")
    own = trainer(framework, max_epochs=1, callbacks=[detection])
    error = None
    try:
        own.fit(net(framework, training_step=training_step), data(2 * len(losses)))
    except RuntimeError as raised:
        error = str(raised)
    assert detection.bad_batches == bad
    assert error is None if not bad else f"Training spike detected in batch {bad[1]}" in str(error)
    file = tmp_path / "skip" / "skip_batches.json"
    assert json.loads(file.read_text()) == bad if bad else not file.exists()


def test_an_exception_of_a_spike_crosses_processes(tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        is_bad = batch_idx == 2 and self.trainer.global_rank == 1
        return sum(one.sum() for one in self.parameters()) * 0 + (50.0 if is_bad else 1.0)

    own = trainer(
        L, max_epochs=1, strategy="ddp_fork", devices=2, callbacks=[OWN.SpikeDetection()], default_root_dir=tmp_path
    )
    with pytest.raises(OWN.spike.TrainingSpikeException, match="in batch 2"):
        own.fit(net(L, training_step=training_step), data(20))
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [1, 2]
    assert pickle.loads(pickle.dumps(OWN.spike.TrainingSpikeException(3))).batch_idx == 3
    spiky = L.fabric.utilities.spike.SpikeDetection(rtol=1.0)
    assert spiky.state_dict() == {"last_val": 0.0, "bad_batches": [], "losses": []}


# --- plugins --------------------------------------------------------------------------------------------------------


def test_plugins_are_taken_as_what_they_stand_for(caplog: pytest.LogCaptureFixture) -> None:
    environments = PLUGINS.environments
    with caplog.at_level(logging.INFO, "echelon.lightning"):
        own = trainer(
            L,
            plugins=[
                environments.SLURMEnvironment(auto_requeue=False),
                environments.LightningEnvironment(),
                environments.TorchElasticEnvironment(),
                PLUGINS.MixedPrecision("bf16-mixed", "cpu"),
                PLUGINS.AsyncCheckpointIO(),
            ],
        )
    assert own.precision == "bf16-mixed" and isinstance(own.strategy.checkpoint_io, PLUGINS.AsyncCheckpointIO)
    assert [one.split(" is taken: ")[0] for one in caplog.messages if " is taken: " in one] == [
        "AsyncCheckpointIO",
        "SLURMEnvironment",
        "LightningEnvironment",
        "TorchElasticEnvironment",
        "MixedPrecision",
    ]
    own.fit(net(L), data())
    assert environments.LightningEnvironment.detect() and not environments.SLURMEnvironment.detect()
    assert environments.SLURMEnvironment().world_size() == 1
    assert trainer(L, plugins=PLUGINS.DoublePrecision()).precision == "64-true"

    class OwnFiles(PLUGINS.CheckpointIO):  # type: ignore[misc, name-defined]
        pass

    with pytest.warns(UserWarning, match="OwnFiles is left out"):
        trainer(L, plugins=[OwnFiles()])


def test_plugins_that_cannot_be_taken_say_so() -> None:
    for make, text in (
        (lambda: trainer(L, plugins=["slurm"]), "plugins must hold launchers, precisions or .*, got 'slurm'"),
        (
            lambda: trainer(L, plugins=[PLUGINS.HalfPrecision()], precision="32-true"),
            "precision is set to '32-true'",
        ),
        (lambda: PLUGINS.MixedPrecision("64-true"), "needs a precision of 16-mixed, bf16-mixed, got '64-true'"),
        (lambda: PLUGINS.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), "needs scaler=None"),
        (lambda: PLUGINS.BitsandbytesPrecision("nf4"), "BitsandbytesPrecision has no counterpart in Echelon"),
        (PLUGINS.XLACheckpointIO, "XLACheckpointIO has no counterpart in Echelon"),
    ):
        with pytest.raises(echelon.ConfigError, match=text):
            make()


# --- arguments ------------------------------------------------------------------------------------------------------


def test_names_of_monitors_can_be_prefixed_and_filtered(tmp_path: Path) -> None:
    stopping = OWN.early_stopping.EarlyStopping("val_loss", stopping_threshold=100.0)
    rates = OWN.LearningRateMonitor("step", log_momentum=True, log_key_prefix="optim/")
    device = OWN.DeviceStatsMonitor(filter_keys={"cpu_percent", "no_such_key"})
    logger = echelon.CSVLogger(tmp_path)
    own = trainer(L, callbacks=[rates, device, stopping], logger=logger, log_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"filter_keys=...\) has \['no_such_key'\], which this device does not report"):
        own.fit(net(L), data(), data())
    names = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"optim/lr-SGD", "optim/lr-SGD-momentum", "DeviceStatsMonitor/cpu_percent"} <= set(names)
    assert not any("bytes" in name or name == "lr-SGD" for name in names) and list(rates.lrs) == ["optim/lr-SGD"]
    assert stopping.stopping_reason is OWN.early_stopping.EarlyStoppingReason.STOPPING_THRESHOLD
