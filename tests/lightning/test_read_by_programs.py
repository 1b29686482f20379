"""Names and lines of Lightning's that programs read beside a run: counters, summaries, averages, plugins, Fabric."""

import logging
import pickle
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon
import echelon.lightning as L
from echelon.lightning.demos.boring import BoringModel, RandomDataset

pl = L.pytorch
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def trained(tmp_path, model=None, **settings):
    trainer = L.Trainer(default_root_dir=tmp_path, **{"max_epochs": 1, **QUIET, **settings})
    trainer.fit(BoringModel() if model is None else model)
    return trainer


# --- utilities ---


def test_a_summary_has_its_layers_by_name_and_reads_the_modes_when_asked():
    class Own(BoringModel):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(3))

    model = Own()
    summary = pl.utilities.model_summary.summarize(model)
    assert list(summary.summarize()) == ["layer"]
    model.layer.eval()
    assert summary.total_training_modes == {"train": 0, "eval": 1} and summary.max_depth == 1
    columns = dict(summary._get_summary_data())
    assert columns["Name"] == ["layer", "other params"] and columns["Params"] == ["66", "3"]
    assert columns["Type"][-1] == "n/a" and columns["Mode"] == ["train", "n/a"]
    assert summary.total_layer_params == 66
    assert pl.utilities.model_summary.get_human_readable_count(1230) == "1.23 K"


def test_values_and_signatures_are_looked_at():
    parsing = pl.utilities.parsing
    hparams = {"kept": 1, "gone": lambda: None}
    assert parsing.is_picklable(1) and not parsing.is_picklable(hparams["gone"])
    with pytest.warns(UserWarning, match="Attribute 'gone' removed from hparams because it cannot be pickled"):
        parsing.clean_namespace(hparams)
    assert hparams == {"kept": 1}
    tensors = {"a": torch.ones(1, requires_grad=True), "b": {"c": 1}}
    assert not pl.utilities.memory.recursive_detach(tensors)["a"].requires_grad and tensors["a"].requires_grad
    takes = pl.utilities.signature_utils.is_param_in_hook_signature
    assert takes(lambda dataloader_iter: None, "dataloader_iter") and not takes(lambda batch: None, "dataloader_iter")
    assert takes(lambda *args: None, "batch") and not takes(lambda *args: None, "batch", explicit=True)
    assert takes(lambda a, b: None, "c", min_args=2)
    with pytest.raises(ValueError, match="Expected a parent"):
        pl.utilities.model_helpers.is_overridden("fit", object())
    assert not pl.utilities.model_helpers.is_overridden("fit", None)


def test_plugins_under_their_old_names_warn_and_are_taken(tmp_path):
    with pytest.warns(DeprecationWarning, match="The `DoublePrecisionPlugin` is deprecated. Use `DoublePrecision`"):
        plugin = pl.plugins.DoublePrecisionPlugin()
    assert L.Trainer(plugins=plugin, **QUIET).precision == "64-true"
    with pytest.warns(DeprecationWarning, match="The `MixedPrecisionPlugin` is deprecated"):
        assert pl.plugins.MixedPrecisionPlugin("bf16-mixed").precision == "bf16-mixed"
    model = BoringModel()
    with pytest.warns(DeprecationWarning, match="`LightningDoublePrecisionModule` is deprecated and no longer needed"):
        assert pl.plugins.precision.double.LightningDoublePrecisionModule(model) is model


def test_an_optimizer_can_be_wrapped_by_hand():
    weight = nn.Parameter(torch.ones(1))
    optimizer = pl.core.optimizer.LightningOptimizer(torch.optim.SGD([weight], lr=0.5))
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == 0.5 and isinstance(optimizer, torch.optim.SGD)


def test_early_stopping_is_equal_to_its_copy():
    stopping = pl.callbacks.EarlyStopping("loss", mode="min")
    assert vars(pickle.loads(pickle.dumps(stopping))) == vars(stopping)


# --- trainer ---


def test_loops_have_their_counters(tmp_path):
    trainer = trained(tmp_path, limit_train_batches=3, limit_val_batches=2)
    state = trainer.fit_loop.state_dict()
    assert state["epoch_loop.batch_progress"]["total"]["completed"] == 3 and state["epoch_loop.global_step"] == 3
    assert trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed == 2
    assert trainer.validate_loop.batch_progress.total.completed == 0 and not trainer.test_loop.restarting
    trainer.validate(verbose=False)
    assert trainer.validate_loop.batch_progress.current.completed == 2
    assert trainer.predict_loop.batch_progress.current.completed == 0


def test_a_limit_of_one_says_what_it_means(caplog):
    with caplog.at_level(logging.INFO):
        L.Trainer(limit_train_batches=1, limit_val_batches=1.0, **QUIET)
        L.Trainer(barebones=True)
    assert "`Trainer(limit_train_batches=1)` was configured so 1 batch per epoch will be used" in caplog.text
    assert "`Trainer(limit_val_batches=1.0)` was configured so 100% of the batches will be used" in caplog.text
    assert "running in `Trainer(barebones=True)` mode" in caplog.text


def test_max_time_is_seen_as_a_timer_and_profilers_in_any_case(tmp_path):
    trainer = L.Trainer(max_time="00:00:10:00", profiler="Simple", **QUIET)
    (timer,) = [callback for callback in trainer.callbacks if isinstance(callback, pl.callbacks.Timer)]
    assert 599 < timer.time_remaining() <= 600
    assert isinstance(trainer.profiler, pl.profilers.SimpleProfiler)


def test_a_bar_counts_no_validation_in_an_epoch_without_one(tmp_path):
    class Counts(pl.callbacks.TQDMProgressBar):
        seen: ClassVar = []

        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            self.seen.append(self.total_val_batches)

    settings = {**QUIET, "enable_progress_bar": True, "limit_train_batches": 1, "limit_val_batches": 2}
    trained(tmp_path, max_epochs=3, check_val_every_n_epoch=2, callbacks=Counts(), **settings)
    assert Counts.seen == [0, 2, 0]


class Counted(pl.callbacks.WeightAveraging):
    """Counts the exchanges of weights."""

    swaps = copies = 0

    def _swap_models(self, *args):
        self.swaps += 1
        return super()._swap_models(*args)

    def _copy_average_to_current(self, *args):
        self.copies += 1
        return super()._copy_average_to_current(*args)


def test_an_average_can_be_read_and_its_exchanges_wrapped(tmp_path):
    class Steps(BoringModel):
        seen: ClassVar = []

        def on_train_batch_end(self, *args):
            self.seen.append(self.layer.weight.detach().clone())

    model, averaging = Steps(), Counted()
    trained(tmp_path, model, callbacks=averaging, limit_train_batches=4, limit_val_batches=1, num_sanity_val_steps=0)
    assert (averaging.swaps, averaging.copies) == (2, 1) and averaging._average_model.n_averaged == 4
    mean = torch.stack(Steps.seen).mean(0)
    torch.testing.assert_close(model.layer.weight.detach(), mean)
    exponential = pl.callbacks.EMAWeightAveraging(decay=0.5)
    trained(tmp_path, callbacks=exponential, limit_train_batches=2, limit_val_batches=0)
    assert isinstance(exponential, pl.callbacks.WeightAveraging) and exponential._average_model.n_averaged == 2
    assert exponential._average_model.module.layer.weight.shape == (2, 32)


def test_a_callback_of_a_function_saves_its_state_into_one_file(tmp_path):
    class Local(L.Callback):
        def state_dict(self):
            return {"seen": 3}

    trainer = trained(tmp_path, callbacks=Local(), limit_train_batches=1, limit_val_batches=0)
    state = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert {"seen": 3} in state["callbacks"].values()


def test_sizes_that_are_tried_are_logged(tmp_path, caplog):
    class Sized(BoringModel):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(RandomDataset(32, 8), batch_size=self.batch_size)

    trainer = L.Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    with caplog.at_level(logging.INFO):
        assert pl.tuner.Tuner(trainer).scale_batch_size(Sized(), init_val=4, max_trials=4) == 8
    assert caplog.text.count("Batch size 4 succeeded, trying batch size 8") == 1
    assert caplog.text.count("The batch size 8 is greater or equal than the length of your dataset") == 1


# --- Fabric ---


class Rows:
    """A logger that keeps its rows."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((metrics, step))


class Inner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.part = BoringModel()


def test_a_module_set_up_by_fabric_logs_clips_and_finds_its_optimizer():
    rows = Rows()
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=rows)
    module = BoringModel()
    assert module.fabric is None and module.loggers == []
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert module.optimizers() is optimizer and module.loggers == [rows] and module.trainer.global_rank == 0
    module.log("loss", 0.5)
    module.log("silent", 1, logger=False)
    module.log_dict({"a": torch.tensor(2.0)})
    assert rows.rows == [({"loss": 0.5}, None), ({"a": 2.0}, None)]
    with pytest.raises(ValueError, match="`list` values cannot be logged; give a number"):
        module.log("bad", [])
    with pytest.raises(ValueError, match="nested dictionaries cannot be logged"):
        module.log_dict({"bad": {"a": 1}})
    with pytest.raises(AttributeError, match=r"tried to access `self.trainer.current_epoch`, which Fabric"):
        module.trainer.current_epoch  # noqa: B018 - the read raises
    fabric.backward(module(torch.ones(1, 32)).sum())
    module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    assert torch.nn.utils.get_total_norm(p.grad for p in module.parameters()) <= 0.5001


def test_fabric_reaches_modules_inside_and_can_be_taken_away():
    outer, fabric = Inner(), L.Fabric(accelerator="cpu", devices=1)
    outer.fabric = fabric
    assert outer.part.fabric is outer.fabric
    outer.fabric = None
    assert outer.part.fabric is None
    with warnings.catch_warnings(), pytest.raises(echelon.RunError, match="not attached to a `Trainer`"):
        outer.trainer  # noqa: B018 - the read raises


def test_a_module_asks_its_trainer_for_its_ranks():
    module = BoringModel()
    assert (module.global_rank, module.local_rank) == (0, 0)
    module.trainer = SimpleNamespace(global_rank=3, local_rank=1)
    assert (module.global_rank, module.local_rank) == (3, 1)
