"""The Trainer has Lightning's signatures and members; the expectations are those of Lightning 2.6.6."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises

from echelon import ConfigError, Trainer, TrainModule

PARAMETERS = {
    "fit": ["model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only"],
    "validate": ["model", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
    "test": ["model", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
    "predict": ["model", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "weights_only"],
    "save_checkpoint": ["filepath", "weights_only", "storage_options"],
    "init_module": ["empty_init"],
}
MEMBERS = re.findall(
    r"\w+",
    """
    accelerator accumulate_grad_batches barebones callback_metrics callbacks check_val_every_n_epoch
    checkpoint_callback checkpoint_callbacks ckpt_path current_epoch datamodule default_root_dir device_ids
    distributed_sampler_kwargs early_stopping_callback early_stopping_callbacks enable_autolog_hparams
    enable_validation estimated_stepping_batches evaluating fast_dev_run fit global_rank global_step
    gradient_clip_algorithm gradient_clip_val init_module interrupted is_global_zero is_last_batch
    lightning_module limit_predict_batches limit_test_batches limit_train_batches limit_val_batches local_rank
    log_dir log_every_n_steps logged_metrics logger loggers lr_scheduler_configs max_epochs max_steps min_epochs
    min_steps model node_rank num_devices num_nodes num_predict_batches num_sanity_val_batches
    num_sanity_val_steps num_test_batches num_training_batches num_val_batches optimizers overfit_batches
    precision predict predict_dataloaders predicting print profiler progress_bar_callback progress_bar_metrics
    received_sigterm reload_dataloaders_every_n_epochs sanity_checking save_checkpoint scaler should_stop state
    strategy test test_dataloaders testing train_dataloader training val_check_interval val_dataloaders validate
    validating world_size
    """,
)
WITHOUT_COUNTERPART = ["fit_loop", "validate_loop", "test_loop", "predict_loop", "precision_plugin", "val_check_batch"]


@pytest.mark.parametrize(("method", "names"), PARAMETERS.items())
def test_methods_take_lightnings_arguments_in_their_order(method: str, names: list[str]) -> None:
    parameters = list(inspect.signature(getattr(Trainer, method)).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY] == names


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_lightnings_trainer_are_there(name: str) -> None:
    assert hasattr(Trainer, name)


@pytest.mark.parametrize("name", WITHOUT_COUNTERPART)
def test_what_has_no_counterpart_is_absent(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(quiet(), name)


def test_weights_only_is_taken_everywhere_and_changes_nothing(tmp_path: Path) -> None:
    module, trainer = Regression(), quiet(tmp_path, max_epochs=1)
    trainer.fit(model=module, train_dataloaders=loader(), weights_only=False)
    trainer.save_checkpoint(filepath=tmp_path / "a.ckpt", weights_only=None, storage_options=None)
    for weights_only in (None, True, False):
        given = {"ckpt_path": tmp_path / "a.ckpt", "weights_only": weights_only}
        quiet(max_epochs=2).fit(Regression(), loader(), **given)
        quiet().validate(Regression(), loader(), verbose=False, **given)
        assert len(quiet().predict(Regression(), loader(), **given) or ()) == 4


class Children(TrainModule):
    """A module without forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Regression, Children])
def test_a_compiled_module_is_trained_as_compiled(kind: Any) -> None:
    torch.compiler.reset()  # nothing is compiled once other tests have compiled torch's own forward for many modules
    graphs, weights = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = kind()
        trainer = quiet(max_epochs=1)
        trainer.fit(torch.compile(module, backend=backend) if is_compiled else module, loader())
        assert trainer.model is module
        weights.append(torch.cat([p.flatten() for p in module.parameters()]))
        assert bool(graphs) is is_compiled
    assert torch.equal(*weights)


def test_a_compiled_module_cannot_travel_to_other_processes() -> None:
    trainer = quiet(strategy="ddp", devices=2)
    with raises(ConfigError, "strategy='ddp' starts processes", "torch.compile(Regression)", "compile=True"):
        trainer.fit(torch.compile(Regression(), backend="eager"), loader())


def test_the_state_tells_the_method_the_stage_and_how_the_run_ended() -> None:
    seen = []

    class Told(Regression):
        fails = False

        def note(self) -> None:
            state = self.trainer.state  # type: ignore[attr-defined]
            seen.append((state.status, state.fn, state.stage))

        def setup(self, stage: str) -> None:
            self.note()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note()
            if self.fails:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.note()

    trainer, module = quiet(limit_train_batches=1, max_epochs=1, num_sanity_val_steps=1), Told()
    assert (trainer.state.status, trainer.state.fn, trainer.state.finished) == ("initializing", None, False)
    trainer.fit(module, loader(), loader(2))
    trainer.validate(module, loader(2), verbose=False)
    assert seen == [
        ("running", "fit", None),
        ("running", "fit", "sanity_check"),
        ("running", "fit", "train"),
        ("running", "fit", "validate"),
        ("running", "validate", None),
        ("running", "validate", "validate"),
    ]
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == ("validate", None, True)
    module.fails = True
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, loader())
    assert (trainer.state.status, trainer.state.finished, trainer.state.stopped) == ("interrupted", False, True)


def test_the_checkpoint_that_was_given_is_known_afterwards(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Regression(), loader())
    assert trainer.ckpt_path is None
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(dataloaders=loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "a.ckpt")
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"every": 0}, "E0 V E1 V E2 V E3 V E4 V E5 V"),
        ({"every": 2}, "E0 V E1 V train E2 val V E3 V train E4 val V E5 V"),
        ({"every": 1, "check": 3}, "E0 train E1 train E2 val V train E3 train E4 train E5 val V"),
        ({"every": 2, "check": 3}, "E0 E1 train E2 val V E3 train E4 E5 val V"),
        ({"every": 3, "check": 2}, "E0 E1 val V E2 train E3 V E4 E5 val V"),
        ({"every": 4, "check": 2}, "E0 E1 val V E2 E3 V train E4 E5 val V"),
    ],
    ids=str,
)
def test_loaders_are_asked_for_again_when_they_are_needed(settings: dict[str, int], calls: str) -> None:
    class Asked(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def train_dataloader(self) -> Any:
            self.calls.append("train")
            return loader(2)

        def val_dataloader(self) -> Any:
            self.calls.append("val")
            return loader(2)

        def on_train_start(self) -> None:
            assert sorted(self.calls) == ["train", "val"]
            self.calls.clear()

        def on_train_epoch_start(self) -> None:
            self.calls.append(f"E{self.current_epoch}")

        def on_validation_epoch_start(self) -> None:
            if not self.trainer.sanity_checking:  # type: ignore[union-attr]
                self.calls.append("V")

    module = Asked()
    trainer = quiet(
        max_epochs=6,
        reload_dataloaders_every_n_epochs=settings["every"],
        check_val_every_n_epoch=settings.get("check", 1),
        num_sanity_val_steps=1,
    )
    trainer.fit(module)
    assert " ".join(module.calls) == calls
