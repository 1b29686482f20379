"""Runs whose folder is a URL: what loggers and callbacks write is in the store at the end, and is continued there."""

import csv
import io
import shutil
import tempfile

import pytest
import torch

from echelon import CSVLogger, SampleLedger, TensorBoardLogger, Trainer, TrainModule
from echelon.callbacks import GoodputMonitor, ModelCheckpoint
from echelon.common.storage import as_path, spool_folder


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 1})
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    return torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2)


def trainer(root, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, **quiet, **settings},
        default_root_dir=root,
    )


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return spool_folder(as_path("s3://any")).parent


@pytest.fixture
def root(bucket):
    return f"{bucket}/runs"


def names(root):
    return {str(path.relative_to(root)) for path in as_path(root).find()}


def rows(url):
    found = csv.DictReader(io.StringIO(as_path(url).read_text()))
    return [row for row in found if row["loss"]]  # the ledger logs rows of its own


def test_what_a_run_writes_is_in_the_store_when_fit_returns(root, spool):
    run = trainer(
        root,
        logger=[CSVLogger(root, name="table"), TensorBoardLogger(root, name="curves")],
        callbacks=[SampleLedger(), GoodputMonitor()],
        profiler="simple",
    )
    run.fit(Line(), loader())
    assert run.default_root_dir == root
    assert spool in map(type(spool), (run.log_dir, *type(spool)(run.log_dir).parents))
    assert run.logger.url == f"{root}/table/version_0"
    assert len(rows(f"{root}/table/version_0/metrics.csv")) == 4
    found = names(root)
    assert {"table/version_0/hparams.yaml", "table/version_0/goodput.jsonl"} <= found
    assert any(name.startswith("curves/version_0/events.out.tfevents.") for name in found)
    assert "table/version_0/samples/attempt_0001.rank_00000.samples" in found
    assert any("profile" in name or name.endswith(".txt") for name in found)


def test_the_default_logger_and_a_run_without_loggers_write_there_too(root):
    trainer(root).fit(Line(), loader())
    assert any("version_0/events.out" in name for name in names(root))
    run = trainer(f"{root}/bare", logger=False, callbacks=[GoodputMonitor()])
    run.fit(Line(), loader())
    assert names(f"{root}/bare") == {"goodput.jsonl"}


def test_runs_on_machines_that_share_only_the_store_get_different_versions(root, spool):
    for number in range(3):
        shutil.rmtree(spool, ignore_errors=True)
        run = trainer(root, logger=CSVLogger(root, name="table"))
        run.fit(Line(), loader())
        assert run.logger.version == number
    loggers = [CSVLogger(root, name="raced") for _ in range(2)]
    assert [logger.version for logger in loggers] == [0, 0]  # guesses
    for logger in loggers:
        logger.open()
    assert [logger.version for logger in loggers] == [0, 1]


def test_a_version_deleted_from_the_store_leaves_nothing_to_a_new_one(root):
    for _ in range(2):
        run = trainer(root, logger=CSVLogger(root, name="table"))
        run.fit(Line(), loader())
        assert run.logger.version == 0
        assert len(rows(f"{root}/table/version_0/metrics.csv")) == 4
        as_path(root).store.delete_all(as_path(root))


@pytest.mark.parametrize("is_other_machine", [False, True])
def test_a_resumed_run_continues_its_files(root, spool, tmp_path, is_other_machine):
    def run(epochs, **settings):
        logger = [CSVLogger(root, "table", version="one"), TensorBoardLogger(root, "curves", version="one")]
        saver = ModelCheckpoint(tmp_path / "saved", save_top_k=-1)
        callbacks = [saver, SampleLedger(), GoodputMonitor()]
        one = trainer(root, logger=logger, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
        one.fit(Line(), loader(), **settings)

    run(1)
    events = [name for name in names(root) if "events" in name]
    before = {name: as_path(f"{root}/{name}").read_bytes() for name in names(root)}
    if is_other_machine:
        shutil.rmtree(spool)
    run(2, ckpt_path="last")
    assert [int(row["step"]) for row in rows(f"{root}/table/one/metrics.csv")] == list(range(1, 9))
    after = names(root)
    assert set(before) < after and len([name for name in after if "events" in name]) > len(events)
    for name in before:  # that of which the second fetched only the name was not replaced by nothing
        if "events" in name or "samples" in name:
            assert as_path(f"{root}/{name}").read_bytes() == before[name]
    assert "table/one/samples/attempt_0002.rank_00000.samples" in after
    ledger = as_path(f"{root}/table/one/goodput.jsonl").read_bytes()
    assert ledger.startswith(before["table/one/goodput.jsonl"]) and ledger.count(b'"kind":"start"') == 2


class Failing(Line):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_the_files_of_a_run_that_ends_early_are_in_the_store(root, error):
    with pytest.raises(type(error)):
        trainer(root, logger=CSVLogger(root)).fit(Failing(error), loader())
    assert len(rows(f"{root}/echelon_logs/version_0/metrics.csv")) == 2


def test_ranks_started_by_the_trainer_write_there_too(root):
    run = trainer(root, logger=CSVLogger(root), strategy="ddp", devices=2, callbacks=[SampleLedger()])
    run.fit(Line(), loader())
    assert len(rows(f"{run.logger.url}/metrics.csv")) == 2
    ranks = [f"echelon_logs/version_0/samples/attempt_0001.rank_0000{rank}.samples" for rank in range(2)]
    assert set(ranks) <= names(root)


def test_files_that_a_callback_writes_to_log_dir_in_predict_are_copied(root):
    class Writer(Line):
        def predict_step(self, batch, batch_idx):
            folder = type(self.spool)(self.trainer.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.layer(batch), folder / f"prediction-{batch_idx}.pt")

    module = Writer()
    module.spool = as_path("local")
    trainer(root, logger=CSVLogger(root)).predict(module, loader())
    assert {f"echelon_logs/version_0/prediction-{index}.pt" for index in range(4)} <= names(root)
