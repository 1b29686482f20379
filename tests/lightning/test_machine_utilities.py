"""Functions of Lightning's utilities that ask the machine, and names of bars, loops and optimizers beside them."""

import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import echelon.lightning as L
from echelon.lightning.demos.boring import BoringModel, ManualOptimBoringModel, RandomDataset, RandomIterableDataset

pl, fabric = L.pytorch, L.fabric
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def fitted(tmp_path, model, **settings):
    trainer = L.Trainer(default_root_dir=tmp_path, **{**QUIET, "max_epochs": 1, "limit_train_batches": 2, **settings})
    trainer.fit(model)
    return trainer


# --- devices, memory and seeds ---


def test_devices_and_workers_are_counted():
    assert pl.accelerators.find_usable_cuda_devices(0) == []
    assert fabric.accelerators.cuda.is_cuda_available() == torch.cuda.is_available()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="has no visible CUDA devices"):
            fabric.accelerators.find_usable_cuda_devices(2)
    cores = len(os.sched_getaffinity(0))
    assert fabric.utilities.suggested_max_num_workers(1) == max(1, cores - 1)
    assert fabric.utilities.suggested_max_num_workers(10 * cores) == 1
    with pytest.raises(ValueError, match="got 0"):
        fabric.utilities.suggested_max_num_workers(0)
    assert 0 < fabric.plugins.environments.lightning.find_free_network_port() < 65536


def test_errors_of_memory_are_told_apart():
    memory = pl.utilities.memory
    cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
    cuda, cudnn = (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    )
    assert [memory.is_oom_error(error) for error in (cpu, cuda, cudnn, ValueError())] == [True, True, True, False]
    assert memory.is_out_of_cpu_memory(cpu) and not memory.is_out_of_cpu_memory(cuda)
    assert memory.is_cuda_out_of_memory(cuda) and not memory.is_cuda_out_of_memory(cpu)
    assert memory.is_cudnn_snafu(cudnn) and not memory.is_cudnn_snafu(cuda)
    memory.garbage_collection_cuda()


def test_a_seed_is_noted_for_other_programs(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    assert L.seed_everything() == 17
    assert pl.seed_everything(3, workers=True) == 3
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("3", "1")
    first = torch.rand(2)
    fabric.utilities.seed.reset_seed()
    assert torch.equal(torch.rand(2), first)
    drawn = set()
    for worker, rank in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(3 + worker)  # as torch seeds its workers
        fabric.utilities.seed.pl_worker_init_function(worker, rank)
        drawn.add(torch.rand(1).item())
    assert len(drawn) == 3
    monkeypatch.setenv("PL_GLOBAL_SEED", "x")
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED='x'"):
        L.seed_everything()


def test_a_folder_is_shared_with_itself(tmp_path):
    assert fabric.utilities.is_shared_filesystem(L.Trainer(**QUIET).strategy, tmp_path)
    assert not fabric.utilities.distributed._distributed_is_initialized()


# --- data ---


def test_lengths_of_loaders():
    class Sized(IterableDataset):
        def __iter__(self):
            return iter(torch.ones(2, 1))

    loader, stream = DataLoader(RandomDataset(2, 3)), DataLoader(RandomIterableDataset(2, 3))
    data = fabric.utilities.data
    assert (data.sized_len(loader), data.sized_len(stream), data.sized_len(Sized())) == (3, None, None)
    assert data.has_len(loader) and not data.has_len(stream)
    assert data.has_iterable_dataset(stream) and not data.has_iterable_dataset(loader)
    with pytest.warns(UserWarning, match="`list` returned 0 length"):
        assert data.has_len([])
    strategy = L.Trainer(**QUIET).strategy
    assert pl.utilities.data.has_len_all_ranks(loader, strategy)
    assert not pl.utilities.data.has_len_all_ranks(stream, strategy)
    assert pl.utilities.data.extract_batch_size({"a": "text", "b": torch.ones(4, 2)}) == 4


def test_values_of_tensors():
    scalars = fabric.utilities.apply_func.convert_tensors_to_scalars
    assert scalars({"a": torch.tensor(1.5), "b": [torch.tensor([2])], "c": "x"}) == {"a": 1.5, "b": [2], "c": "x"}
    with pytest.raises(ValueError, match="single element"):
        scalars(torch.ones(2))


def test_warnings_can_be_switched_off():
    with warnings.catch_warnings():
        fabric.utilities.warnings.disable_possible_user_warnings(module="echelon.a")
        assert warnings.filters[0][0] == "ignore" and warnings.filters[0][3].match("echelon.a.b")


def test_intervals_of_a_writer_have_names():
    interval = pl.callbacks.prediction_writer.WriteInterval

    class Writer(pl.callbacks.BasePredictionWriter):
        pass

    assert Writer("epoch").interval == interval.EPOCH and interval("batch_and_epoch").on_batch
    assert interval.EPOCH.on_epoch and not interval.EPOCH.on_batch and not interval.BATCH.on_epoch


# --- bars, loops and optimizers ---


def test_bars_of_a_programs_own_begin_with_lightnings_words(tmp_path):
    class Own(pl.callbacks.TQDMProgressBar):
        def init_train_tqdm(self):
            bar = super().init_train_tqdm()
            bar.set_description(f"{self.train_description}: {self.BAR_FORMAT[:7]}")
            return bar

    bar = Own()
    assert type(L.Trainer(logger=False, accelerator="cpu").progress_bar_callback).__name__ == "TQDMProgressBar"
    assert bar.init_train_tqdm().desc.startswith("Training: {l_bar}")
    names = ("sanity_check", "validation", "test", "predict")
    words = ["Sanity Checking", "Validation", "Testing", "Predicting"]
    assert [getattr(pl.callbacks.ProgressBar, f"{name}_description") for name in names] == words
    convert = pl.callbacks.progress.tqdm_progress.convert_inf
    assert (convert(float("inf")), convert(3), convert(None)) == (None, 3, None)
    trainer = L.Trainer(default_root_dir=tmp_path, logger=pl.loggers.CSVLogger(tmp_path, version=4))
    assert pl.callbacks.progress.progress_bar.get_standard_metrics(trainer) == {"v_num": 4}


def test_only_the_parameters_of_a_toggled_optimizer_require_gradients(tmp_path):
    class Two(ManualOptimBoringModel):
        seen = None

        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            with first.toggle_model(sync_grad=batch_idx > 0):
                self.seen = self.layer.weight.requires_grad, self.other.weight.requires_grad
                first.zero_grad()
                self.manual_backward(self(batch).sum())
                first.step()
            with second.toggle_model():
                self.seen += self.layer.weight.requires_grad, self.other.weight.requires_grad

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.other)]

    model = Two()
    fitted(tmp_path, model)
    assert model.seen == (True, False, False, True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_writer_reads_the_indices_of_predictions(tmp_path):
    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            assert trainer.predict_loop.current_batch_indices == list(batch_indices)

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.indices = trainer.predict_loop.epoch_batch_indices
            self.count = len(trainer.predict_loop.predictions)

    writer = Writer("batch_and_epoch")
    trainer = L.Trainer(default_root_dir=tmp_path, callbacks=writer, **QUIET)
    trainer.predict(BoringModel(), DataLoader(RandomDataset(32, 4), batch_size=2))
    assert writer.indices == [[[0, 1], [2, 3]]] and writer.count == 2


def test_averages_are_saved_under_the_name_of_their_class(tmp_path):
    average = pl.callbacks.WeightAveraging()
    assert average.state_key == type(average).__name__ == "WeightAveraging"
    assert pl.profilers.SimpleProfiler.__name__ == "SimpleProfiler"


def test_flags_of_versions_and_precisions():
    flags = pl.utilities.imports
    assert flags._TORCH_GREATER_EQUAL_2_4 and not flags._TORCH_GREATER_EQUAL_99_0
    assert fabric.utilities.imports._PYTHON_GREATER_EQUAL_3_10_0 and not flags._PYTHON_GREATER_EQUAL_4_0
    assert flags._TORCHMETRICS_GREATER_EQUAL_1_0_0 and not flags._XLA_GREATER_EQUAL_2_1
    assert flags._IS_WINDOWS is (os.name == "nt")
    with pytest.raises(AttributeError, match="_TORCH_GREATER_EQUAL_x"):
        flags._TORCH_GREATER_EQUAL_x  # noqa: B018
    for precision, kind in (("bf16-mixed", "MixedPrecision"), ("bf16-true", "HalfPrecision"), ("64-true", "Double")):
        plugin = L.Trainer(**QUIET, precision=precision).precision_plugin
        assert plugin.precision == precision and type(plugin).__name__.startswith(kind)
    assert L.Trainer(**QUIET, precision="bf16-mixed").precision_plugin.device == "cpu"
    assert L.Trainer(**QUIET).precision_plugin.precision == "32-true"


def test_enums_are_written_by_name(tmp_path):
    fn = pl.trainer.states.TrainerFn
    pl.core.saving.save_hparams_to_yaml(tmp_path / "a.yaml", {"fn": fn.FITTING})
    assert pl.core.saving.load_hparams_from_yaml(tmp_path / "a.yaml")["fn"] == "FITTING"
