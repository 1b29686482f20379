"""What libraries read from a trainer, its parts and Lightning's utilities; the values are those of Lightning 2.6.6."""

import pickle
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import echelon
import echelon.lightning as L
from echelon.lightning.stand_in import module_of


def module(path):
    """Return the module that stands in for this one of Lightning's."""
    return module_of(f"lightning.pytorch.{path}", "stands_in")


boring = module("demos.boring_classes")


def trainer(**settings):
    silent = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_train_batches": 4,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**silent, **settings})


class Notes(boring.BoringModel):
    """Notes the counters of the loop in each batch."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def on_train_batch_start(self, batch, batch_idx):
        loop = self.trainer.fit_loop
        seen = loop.total_batch_idx, loop.batch_idx, loop.epoch_loop.global_step, loop.epoch_loop._batches_that_stepped
        assert loop.epoch_loop.batch_progress.current.ready == batch_idx + 1
        self.notes.append(seen)


def test_counters_and_limits_of_the_loop():
    own, net = trainer(max_epochs=2), Notes()
    loop = own.fit_loop
    assert (loop.total_batch_idx, loop.batch_idx, loop.max_epochs, loop.max_steps) == (-1, -1, 2, -1)
    own.fit(net)
    assert net.notes == [(total, total % 4, total, total) for total in range(8)]
    assert (loop.total_batch_idx, loop.epoch_progress.current.completed, loop.max_batches) == (7, 2, 4)
    assert loop.epoch_loop.batch_progress.total.completed == 8
    loop.max_epochs, loop.epoch_loop.max_steps = 4, 7
    assert (own.max_epochs, own.max_steps) == (4, 7)


@pytest.mark.parametrize("validates", [True, False])
def test_a_module_may_ask_for_the_validation_loop_where_it_makes_its_optimizer(validates):
    class Asks(boring.BoringModel):
        def configure_optimizers(self):
            self.found = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
            return super().configure_optimizers()

    net = Asks()
    if not validates:
        net.val_dataloader = None
    trainer(fast_dev_run=True).fit(net)
    assert net.found is validates


def test_the_state_is_of_lightnings_enums():
    own = trainer(fast_dev_run=True)
    assert (own.state.fn, own.state.status.value) == (None, "initializing")
    own.fit(boring.BoringModel())
    assert (own.state.fn.value, own.state.status.value, own.state.stage) == ("fit", "finished", None)
    assert own.state.fn == L.TrainerFn.FITTING == "fit"


def test_settings_and_stops_may_be_set_before_a_fit():
    own = trainer()
    own.limit_val_batches, own.limit_train_batches, own.should_stop = 2, 3, False
    own.fit(boring.BoringModel())
    assert (own.global_step, own.num_val_batches) == (3, [2])


def test_the_accelerator_is_an_object_that_reads_as_its_name():
    for given in ("cpu", "auto", L.CPUAccelerator()) if not torch.cuda.is_available() else ("cpu", L.CPUAccelerator()):
        found = trainer(accelerator=given).accelerator
        assert isinstance(found, L.CPUAccelerator) and not isinstance(found, L.CUDAAccelerator)
        assert (str(found), found == "cpu", found.name()) == ("cpu", True, "cpu")
    assert echelon.Trainer(accelerator="cpu", logger=False).accelerator == "cpu"


def test_barriers_have_names_and_ranks_a_number(monkeypatch):
    trainer().strategy.barrier("loaded")
    assert L.rank_zero_only.rank == 0
    launched = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "x",
        "MASTER_PORT": 1,
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))

    @L.rank_zero_only
    def plain():
        return "ran"

    assert (plain(), L.rank_zero_only(lambda: 1, default=2)(), L.rank_zero_only.rank) == (None, 2, 1)


def test_norms_of_gradients_are_named_with_a_float():
    net = nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    for given, shown in ((2, "2.0"), ("inf", "inf"), (1.5, "1.5")):
        names = [f"grad_{shown}_norm/weight", f"grad_{shown}_norm/bias", f"grad_{shown}_norm_total"]
        assert list(L.grad_norm(net, given)) == names
    assert L.grad_norm(net, 2)["grad_2.0_norm_total"] == pytest.approx(3**0.5)


def test_summaries_of_a_module():
    summary = module("utilities.model_summary").ModelSummary(boring.BoringModel(), max_depth=1)
    assert (summary.total_parameters, summary.layer_names) == (66, ["layer"])
    own = trainer(callbacks=[L.RichModelSummary(max_depth=2)], enable_model_summary=True, enable_advice=False)
    assert [type(callback).__name__ for callback in own.callbacks] == ["RichModelSummary"]


def test_what_is_none_or_the_bases_is_not_overridden():
    class Net(boring.BoringModel):
        on_train_epoch_end = None
        on_train_batch_start = None

        def __init__(self):
            super().__init__()
            self.val_dataloader = super(boring.BoringModel, self).val_dataloader
            self.on_train_start = None

    class Own(echelon.Callback):
        on_train_epoch_end = None

    net, own = Net(), trainer(callbacks=Own())
    own.fit(net)
    assert (own.global_step, own.num_val_batches) == (4, [])
    assert not L.is_overridden("val_dataloader", net) and not L.is_overridden("on_train_start", net)


def test_annotations_and_bases_of_hooks_are_there():
    from echelon.lightning import LRSchedulerCallable, OptimizerCallable

    assert get_args(OptimizerCallable)[1] is torch.optim.Optimizer
    assert get_args(LRSchedulerCallable)[0] == [torch.optim.Optimizer]
    hooks = module("core.hooks")

    class Mixin(hooks.ModelHooks):
        ended = 0

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            self.ended += 1

    class Net(Mixin, boring.BoringModel):
        pass

    net = Net()
    trainer().fit(net)
    assert net.ended == 4
    assert isinstance(net, hooks.DataHooks) and issubclass(L.LightningDataModule, hooks.DataHooks)
    assert isinstance(net, hooks.CheckpointHooks)


def test_the_profiler_takes_what_torchs_takes(tmp_path):
    ready = []
    steps = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    make = partial(L.PyTorchProfiler, tmp_path, "ops", row_limit=5, schedule=steps)
    trainer(profiler=make(on_trace_ready=lambda profile: ready.append(profile.step_num), with_stack=True)).fit(
        boring.BoringModel()
    )
    assert len(ready) == 1 and "Self CPU" in next(tmp_path.glob("*ops*")).read_text()
    with pytest.raises(echelon.ConfigError, match=r"schedul=.* is no argument .* Did you mean 'schedule'"):
        L.PyTorchProfiler(schedul=steps)
    with pytest.raises(echelon.ConfigError, match="emit_nvtx must be False, got True"):
        make(emit_nvtx=True)


def test_bars_print_and_are_there_after_the_run(capsys):
    bar = L.TQDMProgressBar(refresh_rate=2, process_position=1)
    own = trainer(callbacks=bar, enable_progress_bar=True)
    bar.print("before", "it")
    own.fit(boring.BoringModel())
    assert "before it\n" in capsys.readouterr().out
    assert (bar.process_position, bar.train_progress_bar.n, bar.train_progress_bar.total) == (1, 4, 4)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (1, 1)


def test_boring_classes_train_evaluate_and_predict():
    own = trainer(max_epochs=2)
    own.fit(boring.BoringModel(), datamodule=boring.BoringDataModule())
    own.test(boring.BoringModel(), verbose=False)
    assert len(own.predict(boring.BoringModel())) == 64
    manual = boring.ManualOptimBoringModel()
    before = manual.layer.weight.detach().clone()
    own = trainer()
    own.fit(manual)
    assert own.global_step == 4 and not torch.equal(manual.layer.weight, before)
    assert len(boring.RandomDataset(32, 64)) == len(boring.RandomIterableDatasetWithLen(32, 64)) == 64
    assert boring.RandomDictDataset(3, 2)[0]["b"].shape == (3,)
    assert boring.DemoModel()(torch.ones(1, 32)).shape == (1, 10)


def test_devices_are_where_libraries_look_for_them():
    assert trainer()._accelerator_connector._parallel_devices == [torch.device("cpu")]
    cuda = module_of("lightning.fabric.accelerators.cuda", "lightning.fabric.accelerators.cuda")
    assert cuda.num_cuda_devices() == torch.cuda.device_count()


class WithAClass(boring.BoringModel):
    def __init__(self, kind=torch.nn.ReLU):
        super().__init__()
        self.save_hyperparameters()


def test_a_class_among_the_hyper_parameters_is_one_in_a_file(tmp_path):
    own = trainer(fast_dev_run=True)
    own.fit(WithAClass(torch.nn.Tanh))
    own.save_checkpoint(tmp_path / "model.ckpt")
    opened = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert opened["hyper_parameters"] == {"kind": torch.nn.Tanh}
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global.*Tanh"):
        torch.load(tmp_path / "model.ckpt", weights_only=True)
    with torch.serialization.safe_globals([torch.nn.Tanh]):
        assert torch.load(tmp_path / "model.ckpt", weights_only=True)["hyper_parameters"] == {"kind": torch.nn.Tanh}
    assert WithAClass.load_from_checkpoint(tmp_path / "model.ckpt").hparams.kind is torch.nn.Tanh
    ours = echelon.Trainer(accelerator="cpu", fast_dev_run=True, enable_progress_bar=False, logger=False)
    ours.fit(WithAClass(torch.nn.Tanh))
    ours.save_checkpoint(tmp_path / "ours.ckpt", single_file=True)
    opened = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert opened["hyper_parameters"] == {"kind": "torch.nn.modules.activation:Tanh"}


class WithAnArray(boring.BoringModel):
    def __init__(self, ids=None):
        super().__init__()
        self.save_hyperparameters()


def test_an_array_among_the_hyper_parameters_is_one_in_a_file(tmp_path):
    own, ids = trainer(fast_dev_run=True), np.array(["PAD", 3], dtype=object)
    own.fit(WithAnArray(ids))
    own.save_checkpoint(tmp_path / "model.ckpt")
    opened = torch.load(tmp_path / "model.ckpt", weights_only=False)["hyper_parameters"]["ids"]
    loaded = WithAnArray.load_from_checkpoint(tmp_path / "model.ckpt").hparams.ids
    for found in (opened, loaded):
        assert found.dtype == object and found.tolist() == ["PAD", 3]


def test_functions_of_utilities(tmp_path):
    parsing, tying, compiled = (module(f"utilities.{name}") for name in ("parsing", "parameter_tying", "compile"))
    saving = module("core.saving")
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    assert tying.find_shared_parameters(net) == [["a.weight", "b.weight"]]
    net["b"].weight = nn.Parameter(torch.zeros(2, 2))
    assert tying.set_shared_parameters(net, [["a.weight", "b.weight"]])["b"].weight is net["a"].weight
    model = boring.BoringModel()
    model.save_hyperparameters({"size": 3})
    parsing.lightning_setattr(model, "size", 4)
    assert parsing.lightning_hasattr(model, "size") and parsing.lightning_getattr(model, "size") == 4
    with pytest.raises(AttributeError, match="'none'"):
        parsing.lightning_getattr(model, "none")
    assert compiled.from_compiled(torch.compile(model)) is compiled.to_uncompiled(model) is model
    way = module("utilities.enums").GradClipAlgorithmType.NORM
    saving.save_hparams_to_yaml(tmp_path / "e.yaml", {"way": way})
    assert saving.load_hparams_from_yaml(tmp_path / "e.yaml", use_omegaconf=False) == {"way": "NORM"}
    saving.save_hparams_to_yaml(tmp_path / "h.yaml", {"a": 1, "b": {"c": [2.5]}})
    assert saving.load_hparams_from_yaml(tmp_path / "h.yaml", use_omegaconf=False) == {"a": 1, "b": {"c": [2.5]}}
    torch.manual_seed(1)
    with module("utilities.seed").isolate_rng():
        first = torch.rand(1)
    assert torch.rand(1) == first
    count = module_of("lightning.fabric.utilities.throughput", "stands_in")
    assert count.measure_flops(model, lambda: model(torch.zeros(1, 32))) == 2 * 32 * 2


def test_names_of_a_trainer_and_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = trainer(logger=True, num_sanity_val_steps=-1, enable_progress_bar=True, max_steps=3)
    loggers = module("loggers")
    assert isinstance(own.logger, loggers.TensorBoardLogger) and own.logger.root_dir == "lightning_logs"
    assert own.num_sanity_val_steps == float("inf") and not own._accelerator_connector.is_distributed
    data = own.datamodule = boring.BoringDataModule()
    assert own.datamodule is data and boring.BoringModel().loggers == []
    own.fit(boring.BoringModel())
    assert own.datamodule is data and not own.fit_loop.restarting
    bar = own.progress_bar_callback
    assert (bar.total_train_batches, bar.total_val_batches, bar.train_progress_bar.total) == (4, 1, 4)
    stages = module("trainer.states").RunningStage
    assert [stage.dataloader_prefix for stage in stages] == ["train", "val", "val", "test", "predict"]
    assert not module("accelerators").XLAAccelerator.is_available()
    flags = module("utilities.imports")
    assert flags._TORCH_AVAILABLE and not flags._NO_SUCH_PACKAGE_AVAILABLE


def test_profilers_keep_what_lightnings_keep(tmp_path):
    profilers = module("profilers")
    simple, advanced = profilers.SimpleProfiler(), profilers.AdvancedProfiler(tmp_path, dump_stats=True)
    for profiler in (simple, simple, advanced):
        with profiler.profile("a/b"):
            pass
    assert len(simple.recorded_durations["a/b"]) == 2 and list(advanced.profiled_actions) == ["a/b"]
    simple.start("c")
    with pytest.raises(echelon.ConfigError, match="Attempted to start c which has already started"):
        simple.start("c")
    advanced.describe()  # without a trainer
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".prof", ".txt"]


def test_a_hook_set_to_none_is_not_called_and_a_boring_model_is_scriptable():
    model = boring.BoringModel()
    model.on_validation_model_train = model.on_validation_model_eval = model.on_validation_model_zero_grad = None
    trainer().fit(model)
    with pytest.warns(DeprecationWarning, match=r"removed in v2\.8 of Lightning"):
        assert model.to_torchscript()(torch.zeros(1, 32)).shape == (1, 2)


def test_loaders_of_the_sanity_check_are_asked_for_in_it():
    asked = []

    class Asked(boring.BoringModel):
        def val_dataloader(self):
            asked.append(self.trainer.sanity_checking)
            return super().val_dataloader()

    for steps in (0, 1):
        trainer(num_sanity_val_steps=steps).fit(Asked())
    assert asked == [False, True]


def test_numbers_of_a_fixed_width_and_sizes_that_are_unknown():
    tqdm = module("callbacks.progress.tqdm_progress").Tqdm
    shown = [tqdm.format_num(number) for number in (1, 1.0, 0.1, 1e-5, "1.0", "10000", "abc")]
    assert shown == ["1", "1.000", "0.100", "1e-5", "1.000", "10000", "abc"]
    with pytest.raises(ValueError, match="positive number or 'inf', got -1"):
        module("utilities.grads").grad_norm(boring.BoringModel(), -1)
    net = nn.Sequential(nn.Identity())
    for given in ([], torch.tensor(0)):
        net.example_input_array = (given,)
        assert echelon.callbacks.summarize(net).in_sizes == ["?"]


def test_counters_in_a_validation_are_those_of_training():
    seen = []

    class Seen(boring.BoringModel):
        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.fit_loop.total_batch_idx, self.trainer.fit_loop.batch_idx))

    settings = {"max_epochs": 3, "limit_val_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
    trainer(**settings, num_sanity_val_steps=1).fit(Seen())
    assert seen == [(-1, -1), (2, 2), (2, 2), (5, 1), (5, 1), (8, 0), (8, 0), (11, 3), (11, 3)]


def test_predictions_by_default_and_a_silent_logger():
    own = trainer(fast_dev_run=1, logger=True)
    assert len(own.predict(boring.BoringModel(), return_predictions=None)) == 1
    assert own.predict(boring.BoringModel(), return_predictions=False) is None
    own.logger.log_hyperparams(1, two=2)
    own.logger.experiment["a"] = own.logger.experiment[0]


def test_a_bar_of_a_stream_ends_at_max_steps():
    own = trainer(enable_progress_bar=True, max_epochs=-1, max_steps=3, limit_train_batches=1.0)
    own.fit(boring.BoringModel(), torch.utils.data.DataLoader(boring.RandomIterableDataset(32, 8)))
    assert own.progress_bar_callback.train_progress_bar.total == 3


def test_the_text_demo_gives_lightnings_numbers(tmp_path, monkeypatch):
    demos = module("demos")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    torch.manual_seed(1)
    model = demos.Transformer(vocab_size=20, ninp=8, nhid=8).eval()
    tokens = torch.arange(10).view(2, 5)
    assert model(tokens, tokens + 1).sum().item() == pytest.approx(-635.12841796875, rel=1e-6)
    (tmp_path / "data" / "wikitext-2.txt").write_text("a b a\nc\n\nb b\n")
    text = demos.WikiText2(block_size=3)
    assert (text.vocab_size, len(text), text.data.tolist()) == (4, 2, [0, 1, 0, 2, 3, 2, 2, 1, 1, 2])
    assert [block.tolist() for block in text[0]] == [[0, 1, 0], [1, 0, 2]]
    own = trainer(limit_train_batches=2)
    own.fit(demos.LightningTransformer(vocab_size=4), DataLoader(text))
    assert own.global_step == 2


class Digits(Dataset):
    """Stands for torchvision's MNIST."""

    def __init__(self, root, train=True, download=False, transform=None):
        self.size, self.transform = (30 if train else 10), transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.transform(np.full((2, 2), index, np.uint8)), index % 10


def test_the_image_demo_splits_mnist(monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets, "MNIST", Digits)
    demo = module("demos.mnist_datamodule")
    assert len(demo.MNIST("data", train=True, download=True)) == 30
    data = demo.MNISTDataModule(val_split=10, num_workers=0, batch_size=4, normalize=True)
    data.prepare_data()
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [len(loader) for loader in loaders] == [5, 2, 2]
    assert data.num_classes == 10 and isinstance(data, L.LightningDataModule)
    # the split is that of Lightning, which seeds it with 42
    expected = torch.randperm(30, generator=torch.Generator().manual_seed(42))[20:].tolist()
    assert data.dataset_val.indices == expected
    images, _ = next(iter(data.val_dataloader()))
    assert images.shape == (4, 1, 2, 2) and images[0, 0, 0, 0] == pytest.approx(2 * expected[0] / 255 - 1)


def test_examples_find_the_small_utilities():
    pytest.importorskip("torchvision")
    assert module("utilities.imports")._TORCHVISION_AVAILABLE
    model = module("utilities.model_helpers").get_torchvision_model("resnet18", weights=None, num_classes=3)
    assert model.fc.out_features == 3
    fabric = module_of("lightning.fabric", "stands_in_for_fabric")
    assert fabric.wrappers._unwrap_objects([model]) == [model]
    assert fabric.strategies.fsdp.FSDPStrategy is echelon.FSDPStrategy
    assert isinstance(torch.optim.SGD(model.parameters(), 0.1), fabric.utilities.types.Optimizable)
