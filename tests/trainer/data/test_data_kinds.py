"""Every kind of data, and every setting that limits how much of it is read."""

import pytest
import torch
from small import Noted, Regression, flat, indices, loader, quiet, samples
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, CombinedLoader, ConfigError, DataError, DataModule


class Stream(IterableDataset):
    """Samples without a length; notes the epochs that it was given."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return iter(list(samples(self.num_samples)))


class Batches:
    """Ready-made batches: no DataLoader, no length."""

    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return iter(loader(2 * self.num_batches, 2))


class SizedBatches(Batches):
    def __len__(self):
        return self.num_batches


class Unsized:
    """A sampler without a length."""

    def __init__(self, *entries):
        self.entries = entries

    def __iter__(self):
        return iter(self.entries)


class OldStyle:
    """Batches by index, as Python's oldest protocol of iteration has them."""

    def __getitem__(self, index):
        return list(loader(6, 2))[index]


class WebLoader(IterableDataset):
    """Like webdataset's class of this name: a data set by class, and a loader of batches by behavior."""

    def __init__(self, *args, **options):
        self.inner = DataLoader(*args, **options)

    def __iter__(self):
        return iter(self.inner)


FOUR = [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- kinds ---


@pytest.mark.filterwarnings("ignore:The batch size is not clear")
@pytest.mark.parametrize(
    ("data", "batches", "length"),
    [
        (lambda: loader(8, 2), FOUR, 4),
        (lambda: loader(5, 2), [[0, 1], [2, 3], [4]], 3),
        (lambda: loader(5, 2, drop_last=True), [[0, 1], [2, 3]], 2),
        (lambda: DataLoader(Noted(8), 2), FOUR, 4),
        (lambda: DataLoader(Stream(5), 2), [[0, 1], [2, 3], [4]], float("inf")),
        (lambda: DataLoader(Stream(4), 2, num_workers=1), [[0, 1], [2, 3]], float("inf")),
        (lambda: DataLoader(samples(3), batch_size=None), [[0], [1], [2]], 3),
        (lambda: DataLoader(samples(8), batch_size=None, sampler=[[0, 1], [5, 2, 3]]), [[0, 1], [5, 2, 3]], 2),
        (lambda: DataLoader(samples(8), batch_sampler=[[0, 1], [5, 2, 3]]), [[0, 1], [5, 2, 3]], 2),
        (lambda: loader(8, 2, sampler=[7, 5, 3]), [[7, 5], [3]], 2),
        (lambda: loader(8, 2, sampler=Unsized(7, 5, 3)), [[7, 5], [3]], float("inf")),
        (lambda: loader(8, 2, sampler=Unsized(7, 5, 3), drop_last=True), [[7, 5]], float("inf")),
        (lambda: DataLoader(samples(8), batch_sampler=Unsized([7, 5], [3])), [[7, 5], [3]], float("inf")),
        (lambda: Batches(2), [[0, 1], [2, 3]], float("inf")),
        (lambda: SizedBatches(2), [[0, 1], [2, 3]], 2),
        (OldStyle, [[0, 1], [2, 3], [4, 5]], float("inf")),
    ],
    ids=lambda value: "",
)
def test_every_kind_of_loader_is_read_completely_each_epoch(data, batches, length):
    module, trainer = Regression(), quiet(max_epochs=2)
    data = data()
    trainer.fit(module, data, data)
    assert indices(module.seen) == indices(module.validated) == batches * 2
    assert trainer.num_training_batches == length
    assert trainer.num_val_batches == [length]
    assert trainer.global_step == 2 * len(batches)


def test_weights_of_a_batch_without_samples_of_its_own_are_even():
    class Numbers(Regression):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(batch["name"] == "b"), on_epoch=True, on_step=False)
            return self.net.weight.sum() * batch["x"]

    trainer = quiet(max_epochs=1)
    trainer.fit(Numbers(), Named())
    assert trainer.callback_metrics["mean"] == 0.75


class Named:
    def __iter__(self):
        return iter([{"name": name, "x": torch.tensor(1.0)} for name in "abbb"])


def test_data_may_come_from_the_module_or_a_data_module_or_the_call():
    class Own(Regression):
        def train_dataloader(self):
            return loader(2, 2)

    class Data(DataModule):
        def train_dataloader(self):
            return loader(4, 2)

    def seen(*args, **kwargs):
        module = Own()
        quiet(max_epochs=1).fit(module, *args, **kwargs)
        return indices(module.seen)

    assert seen() == [[0, 1]]
    assert seen(datamodule=Data()) == seen(Data()) == [[0, 1], [2, 3]]
    assert seen(loader(6, 3)) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="must get loaders or a data module, got both"):
        seen(loader(6, 3), datamodule=Data())


# --- several loaders ---


class Structured(Regression):
    """Notes the indices of structured batches."""

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return self.net.weight.sum()

    def noted(self):
        def plain(batch):
            if batch is None:
                return None
            if isinstance(batch, dict):
                return {key: plain(value) for key, value in batch.items()}
            if isinstance(batch[0], torch.Tensor):
                return indices([batch])[0]
            return [plain(value) for value in batch]

        return [plain(batch) for batch in self.seen]


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        ([loader(4, 2), loader(2, 2)], [[[0, 1], [0, 1]], [[2, 3], [0, 1]]]),
        ({"a": loader(4, 2), "b": loader(2, 1)}, [{"a": [0, 1], "b": [0]}, {"a": [2, 3], "b": [1]}]),
        (CombinedLoader({"a": loader(4, 2), "b": loader(1, 1)}, "min_size"), [{"a": [0, 1], "b": [0]}]),
        (
            CombinedLoader({"a": loader(4, 2), "b": loader(1, 1)}, "max_size_cycle"),
            [{"a": [0, 1], "b": [0]}, {"a": [2, 3], "b": [0]}],
        ),
        (
            CombinedLoader({"a": loader(4, 2), "b": loader(1, 1)}, "max_size"),
            [{"a": [0, 1], "b": [0]}, {"a": [2, 3], "b": None}],
        ),
        (CombinedLoader([loader(4, 2), loader(1, 1)], "sequential"), [[0, 1], [2, 3], [0]]),
        ({"a": [loader(2, 2), loader(2, 2)]}, [{"a": [[0, 1], [0, 1]]}]),
    ],
    ids=["list", "dict", "min_size", "max_size_cycle", "max_size", "sequential", "nested"],
)
def test_several_training_loaders_give_structured_batches(given, noted):
    module, trainer = Structured(), quiet(max_epochs=2)
    trainer.fit(module, given)
    assert module.noted() == noted * 2
    assert trainer.num_training_batches == len(noted)


def test_shuffled_loaders_side_by_side_are_shuffled_again_each_epoch():
    module = Structured()
    quiet(max_epochs=2).fit(module, {"a": loader(32, 32, shuffle=True), "b": loader(32, 32, shuffle=True)})
    first, second = module.noted()
    assert sorted(first["a"]) == sorted(second["b"]) == list(range(32))
    assert len({tuple(batch[key]) for batch in (first, second) for key in "ab"} - {tuple(range(32))}) >= 2


class Several(Regression):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch_idx, indices([batch])[0]))
        self.log("val", float(dataloader_idx))
        self.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return dataloader_idx, indices([batch])[0]


@pytest.mark.parametrize("given", [lambda a, b: [a, b], lambda a, b: {"x": a, "y": b}, lambda a, b: (a, b)])
def test_several_evaluation_loaders_are_read_one_after_the_other(given):
    module, trainer = Several(), quiet()
    results = trainer.validate(module, given(loader(4, 2), loader(1, 1)), verbose=False)
    assert module.validated == [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0])]
    assert results == [
        {"val/dataloader_idx_0": 0.0, "own_0": 1.0},
        {"val/dataloader_idx_1": 1.0, "own_1": 1.0},
    ]
    assert trainer.num_val_batches == [2, 1]


def test_several_test_and_predict_loaders():
    loaders = [loader(2, 2), loader(1, 1)]
    results = quiet().test(Several(), loaders, verbose=False)
    assert [result[f"val/dataloader_idx_{index}"] for index, result in enumerate(results)] == [0.0, 1.0]
    assert quiet().predict(Several(), loaders) == [[(0, [0, 1])], [(1, [0])]]


def test_evaluation_loaders_may_be_read_side_by_side():
    class Pairs(Regression):
        def validation_step(self, batch, batch_idx):
            self.validated.append([indices([part])[0] for part in batch])

    module = Pairs()
    quiet().validate(module, CombinedLoader([loader(4, 2), loader(2, 2)], "max_size_cycle"), verbose=False)
    assert module.validated == [[[0, 1], [0, 1]], [[2, 3], [0, 1]]]


def test_an_empty_evaluation_loader_is_pointed_out_and_the_others_are_read():
    module = Several()
    with pytest.warns(UserWarning, match=r"Loader 1 for validate has no batches"):
        quiet().validate(module, [loader(2, 2), DataLoader([], 2)], verbose=False)
    assert module.validated == [(0, 0, [0, 1])]


# --- limits ---


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (1, 1), (0.5, 4), (1.0, 8), (0.99, 7)])
def test_a_limit_is_a_count_or_a_fraction_of_each_loader(limit, count):
    module = Regression()
    settings = {"limit_train_batches": limit, "limit_val_batches": limit, "limit_predict_batches": limit}
    trainer = quiet(max_epochs=2, **settings)
    trainer.fit(module, loader(16, 2), loader(16, 2))
    assert indices(module.seen) == indices(module.validated) == [[i, i + 1] for i in range(0, 2 * count, 2)] * 2
    assert (trainer.num_training_batches, trainer.num_val_batches) == (count, [count])
    assert len(trainer.predict(module, loader(16, 2))) == count


def test_a_limit_above_what_there_is_is_pointed_out_and_all_is_read():
    module = Regression()
    with pytest.warns(UserWarning, match=r"limit_train_batches=9, but the training loader has only 4 batches"):
        quiet(max_epochs=1, limit_train_batches=9).fit(module, loader())
    assert indices(module.seen) == FOUR


def test_a_count_limits_data_without_a_length():
    module = Regression()
    trainer = quiet(max_epochs=2, limit_train_batches=2, limit_val_batches=1)
    trainer.fit(module, DataLoader(Stream(100), 2), DataLoader(Stream(100), 2))
    assert indices(module.seen) == [[0, 1], [2, 3]] * 2
    assert indices(module.validated) == [[0, 1]] * 2
    assert trainer.num_training_batches == 2


def test_a_limit_reads_no_sample_more():
    data = Noted(8)
    quiet(max_epochs=1, limit_train_batches=2).fit(Regression(), DataLoader(data, 2))
    assert data.reads == [0, 1, 2, 3]


@pytest.mark.parametrize("amount", [2, 0.5])
def test_overfit_batches_trains_on_the_same_first_batches_unshuffled(amount):
    module = Regression()
    data = loader(8, 2, shuffle=True)
    quiet(max_epochs=3, overfit_batches=amount).fit(module, data, data)
    assert indices(module.seen) == indices(module.validated) == FOUR[:2] * 3


@pytest.mark.parametrize(("setting", "count"), [(True, 1), (3, 3)])
def test_fast_dev_run_runs_so_many_batches_of_everything_and_writes_nothing(tmp_path, setting, count):
    class Everything(Regression):
        def test_step(self, batch, batch_idx):
            self.validated.append(batch)

    module = Everything()
    settings = {"logger": True, "enable_checkpointing": True, "num_sanity_val_steps": 2}
    trainer = quiet(tmp_path, fast_dev_run=setting, max_epochs=7, **settings)
    trainer.fit(module, loader(), loader())
    assert len(module.seen) == len(module.validated) == trainer.global_step == count
    trainer.test(module, loader(), verbose=False)
    assert len(module.validated) == 2 * count
    assert len(trainer.predict(module, loader())) == count
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", ["module", "datamodule"])
@pytest.mark.parametrize(("every", "calls"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_loaders_are_asked_for_again_every_so_many_epochs(every, calls, owner):
    class Reloading(Regression):
        def __init__(self):
            super().__init__()
            self.asked = []

        def train_dataloader(self):
            self.asked.append(self.trainer.current_epoch)
            return loader(2 + 2 * len(self.asked), 2)

        def val_dataloader(self):
            return loader(2, 2)

    class Data(DataModule):
        def __init__(self):
            super().__init__()
            self.asked = []

        train_dataloader, val_dataloader = Reloading.train_dataloader, Reloading.val_dataloader

    module, data = Reloading(), Data()
    trainer = quiet(max_epochs=5, reload_dataloaders_every_n_epochs=every)
    if owner == "module":
        trainer.fit(module)
    else:
        trainer.fit(module, datamodule=data)
    asked = module.asked if owner == "module" else data.asked
    assert asked == calls
    assert trainer.global_step == sum(2 + sum(epoch >= called for called in calls[1:]) for epoch in range(5))


# --- when validation runs ---


class When(Callback):
    """The step at each validation."""

    def __init__(self):
        self.steps = []

    def on_validation_start(self, trainer, module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [5, 10, 15]),
        ({"check_val_every_n_epoch": 2}, [10]),
        ({"val_check_interval": 0.5}, [2, 4, 7, 9, 12, 14]),
        ({"val_check_interval": 0.4, "check_val_every_n_epoch": 2}, [7, 9]),
        ({"val_check_interval": 1}, list(range(1, 16))),
        ({"val_check_interval": 2}, [2, 4, 7, 9, 12, 14]),
        ({"val_check_interval": 5}, [5, 10, 15]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 14]),
        ({"val_check_interval": 4, "accumulate_grad_batches": 3}, [2, 4, 6]),
        ({"num_sanity_val_steps": 1}, [0, 5, 10, 15]),
        ({"num_sanity_val_steps": -1, "limit_val_batches": 1}, [0, 5, 10, 15]),
        ({"limit_val_batches": 0.0}, []),
    ],
    ids=str,
)
def test_validation_runs_when_the_settings_say(settings, steps):
    when = When()
    quiet(max_epochs=3, callbacks=when, **settings).fit(Regression(), loader(10, 2), loader(4, 2))
    assert when.steps == steps


@pytest.mark.parametrize(("settings", "steps"), [({}, [5, 10]), ({"val_check_interval": 3}, [3, 8])])
def test_validation_runs_on_time_where_the_data_has_no_length(settings, steps):
    when = When()
    quiet(max_epochs=2, callbacks=when, **settings).fit(Regression(), DataLoader(Stream(10), 2), loader(4, 2))
    assert when.steps == steps


def test_the_sanity_check_reads_few_batches_and_leaves_no_metrics():
    class Logging(Regression):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val_loss", 1.0)

        def on_train_start(self):
            assert len(self.validated) == 2
            assert dict(self.trainer.callback_metrics) == {}

    module = Logging()
    quiet(max_steps=1, num_sanity_val_steps=2).fit(module, loader(), loader(20, 2))
    assert flat(module.validated[:2]) == [0, 1, 2, 3]


def test_an_interval_that_never_comes_is_refused():
    message = r"val_check_interval=6 must be.*training batches, 5,.*check_val_every_n_epoch=None"
    with pytest.raises(ConfigError, match=message):
        quiet(val_check_interval=6).fit(Regression(), loader(10, 2), loader(2, 2))
    with pytest.raises(ConfigError, match=r"val_check_interval=0.5 is a fraction.*no length.*as an int"):
        quiet(val_check_interval=0.5).fit(Regression(), DataLoader(Stream(10), 2), loader(2, 2))


def test_data_that_turns_out_to_be_empty_is_refused():
    with pytest.raises(DataError, match=r"gave no batch in epoch 0"):
        quiet(max_epochs=-1, max_time="00:00:00:05").fit(Regression(), DataLoader(Stream(0), 2))


def test_a_loader_that_can_be_read_only_once_is_refused_in_the_second_epoch():
    with pytest.raises(DataError, match=r"gave no batch in epoch 1; if it can be read only once, set max_epochs=1"):
        quiet(max_epochs=2).fit(Regression(), iter(loader()))


@pytest.mark.filterwarnings("ignore:The batch size is not clear")
def test_the_loader_of_webdataset_is_a_loader():
    module = Regression()
    quiet(max_epochs=1).fit(module, WebLoader(samples(), 2), WebLoader(samples(4), 2))
    assert indices(module.seen) == FOUR
    assert indices(module.validated) == FOUR[:2]
