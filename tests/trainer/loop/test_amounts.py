"""Limits and intervals in samples and tokens, over all ranks and restarts."""

import pytest
import torch
from recording_logger import RecordingLogger
from small import quiet, raises
from torch import nn
from torch.utils.data import DataLoader

from echelon import (
    Callback,
    ConfigError,
    DeviceStatsMonitor,
    LearningRateMonitor,
    Loss,
    ModelCheckpoint,
    ModuleError,
    ThroughputMonitor,
    TokenBatchSampler,
    TrainModule,
    seed_everything,
)
from echelon.common.durations import Amount, parse_amount
from echelon.testing import run_ranks
from echelon.trainer.data.index_stream import Shuffled

LENGTHS = [3 + number % 5 for number in range(40)]
TEXTS = [torch.arange(length) % 7 + 1 for length in LENGTHS]


def pad(samples):
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Model(TrainModule):
    """Notes the tokens of each step and validation, as the trainer counts them before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 1)
        self.steps, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.steps.append(int(batch["attention_mask"].sum()))
        return self.embedding(batch["input_ids"]).square().mean()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.samples_seen, self.trainer.tokens_seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(batch_size=4):
    return DataLoader(TEXTS, batch_size, shuffle=True, collate_fn=pad)


def fit(ckpt_path=None, **settings):
    module, trainer = Model(), quiet(**settings)
    trainer.fit(module, loader(), DataLoader(TEXTS[:1], 1, collate_fn=pad), ckpt_path=ckpt_path)
    return module, trainer


def test_an_amount_is_read_from_its_text():
    assert parse_amount("x", "10_000 samples") == Amount(10_000, "samples")
    assert parse_amount("x", "2.5M tokens") == Amount(2_500_000, "tokens")
    assert parse_amount("x", "1 token") == Amount(1, "tokens")
    assert parse_amount("x", "3Bsamples") == Amount(3 * 10**9, "samples")
    assert [parse_amount("x", other) for other in (5, 1.0, None, "00:01:00:00", "tokens", "-5 tokens")] == [None] * 6
    with raises(ConfigError, "x must be at least 1 sample or token, got '0 tokens'"):
        parse_amount("x", "0 tokens")


def test_training_ends_after_samples_or_tokens():
    module, trainer = fit(max_samples=50)
    assert (trainer.global_step, trainer.samples_seen) == (13, 52)
    assert trainer.tokens_seen == 0  # nothing counts them
    module, trainer = fit(max_tokens=333)
    assert trainer.tokens_seen == sum(module.steps) >= 333 > sum(module.steps[:-1])
    module, trainer = fit(max_samples=10**6, max_steps=3)
    assert trainer.global_step == 3


def test_the_number_of_steps_is_known_for_samples():
    estimates = []

    class Scheduled(Model):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            estimates.append(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=estimates[-1])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = quiet(max_samples=90)
    trainer.fit(Scheduled(), DataLoader(TEXTS, 16, shuffle=True, collate_fn=pad))
    assert estimates == [trainer.global_step] == [7]  # epochs of 16, 16 and 8 samples


def test_validation_comes_each_time_an_amount_was_seen():
    module, _ = fit(max_epochs=2, val_check_interval="12 samples")
    assert [samples for samples, _ in module.validated] == [12, 24, 36, 48, 60, 72]
    module, _ = fit(max_epochs=2, val_check_interval="50 tokens")
    seen = torch.tensor(module.steps).cumsum(0).tolist()
    due = [now for before, now in zip([0, *seen], seen, strict=False) if now // 50 > before // 50]
    assert [tokens for _, tokens in module.validated] == due and len(due) == 8


def test_checkpoints_and_throughput_count_tokens(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, train_time_interval="100 tokens")
    logger = RecordingLogger(str(tmp_path))
    settings = {"enable_checkpointing": True, "logger": logger, "log_every_n_steps": 5}
    module, trainer = fit(max_epochs=2, callbacks=[saver, ThroughputMonitor()], **settings)
    seen = torch.tensor(module.steps).cumsum(0).tolist()
    pairs = enumerate(zip([0, *seen], seen, strict=False), 1)
    due = [step for step, (before, now) in pairs if now // 100 > before // 100]
    saved = sorted(int(path.name.split("step=")[1].removesuffix(".ckpt")) for path in tmp_path.glob("*step=*.ckpt"))
    assert saved == due and trainer.tokens_seen == seen[-1]
    assert [value for _, value in logger.series("throughput/tokens")] == [
        float(seen[step - 1]) for step in (5, 10, 15, 20)
    ]
    assert all(value > 0 for _, value in logger.series("throughput/tokens_per_sec"))


class Logging(Model):
    """Logs a value each step, and notes in which hooks a step is said to be logged."""

    def __init__(self):
        super().__init__()
        self.said = {"batch_start": [], "batch_end": [], "step_end": []}

    def training_step(self, batch, batch_idx):
        self.log("place", float(self.trainer.global_step + 1))
        return super().training_step(batch, batch_idx)

    def say(self, hook, step):
        if self.trainer.is_log_step:
            self.said[hook].append(step)

    def on_train_batch_start(self, batch, batch_idx):
        self.say("batch_start", self.trainer.global_step + 1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.say("batch_end", self.trainer.global_step)

    def on_train_step_end(self):
        self.say("step_end", self.trainer.global_step)


def due_steps(seen, every):
    pairs = enumerate(zip([0, *seen], seen, strict=False), 1)
    return [step for step, (before, now) in pairs if now // every > before // every]


def fit_logging(tmp_path, every, **settings):
    logger, module = RecordingLogger(str(tmp_path)), Logging()
    monitors = [LearningRateMonitor(logging_interval="step"), DeviceStatsMonitor(cpu_stats=True)]
    trainer = quiet(logger=logger, log_every_n_steps=every, callbacks=monitors, **settings)
    trainer.fit(module, loader())
    return logger, module, trainer


def logged_steps(logger, name):
    return [step for step, _ in logger.series(name)]


@pytest.mark.parametrize("every", ["12 samples", "50 tokens", 3, 0])
def test_loggers_get_the_steps_in_which_an_amount_was_reached(tmp_path, every):
    logger, module, trainer = fit_logging(tmp_path, every, max_epochs=2)
    if every == "50 tokens":
        due = due_steps(torch.tensor(module.steps).cumsum(0).tolist(), 50)
        assert len(due) == 8
    else:
        due = [step for step in range(1, 21) if every and step % 3 == 0]
    assert logger.series("place") == [(step, float(step)) for step in due]
    assert logged_steps(logger, "lr-SGD") == due
    assert logged_steps(logger, "DeviceStatsMonitor/load_1min") == due
    assert module.said == dict.fromkeys(("batch_start", "batch_end", "step_end"), due)
    assert trainer.log_every_n_steps == (every if isinstance(every, int) else 0)


def test_an_amount_that_is_never_reached_is_told(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        fit_logging(tmp_path, "1k samples", max_epochs=1)
    assert "loggers get the values once in 1k samples, so none of 'place'; lower log_every_n_steps" in caplog.text


@pytest.mark.parametrize("stop", [2, 5, 13])
def test_a_resumed_run_logs_the_steps_of_an_undisturbed_one(tmp_path, stop):
    expected = due_steps([4 * step for step in range(1, 21)], 12)
    _, _, begun = fit_logging(tmp_path, "12 samples", max_epochs=2, max_steps=stop)
    begun.save_checkpoint(tmp_path / "at.ckpt")
    logger, module = RecordingLogger(str(tmp_path)), Logging()
    trainer = quiet(logger=logger, log_every_n_steps="12 samples", max_epochs=2)
    trainer.fit(module, loader(), ckpt_path=tmp_path / "at.ckpt")
    assert logged_steps(logger, "place") == [step for step in expected if step > stop]


@pytest.mark.parametrize("stop", [1, 4, 11])
def test_a_resumed_run_goes_on_counting(tmp_path, stop):
    settings = {"val_check_interval": "70 tokens", "max_tokens": 300}
    whole, expected = fit(**settings)
    first, begun = fit(**settings, max_steps=stop)
    begun.save_checkpoint(tmp_path / "at.ckpt")
    rest, trainer = fit(ckpt_path=tmp_path / "at.ckpt", **settings)
    assert first.steps + rest.steps == whole.steps
    assert first.validated + rest.validated == whole.validated
    assert trainer.tokens_seen == expected.tokens_seen and trainer.global_step == expected.global_step


class LoggedSteps(Callback):
    """Notes the steps that are said to be logged."""

    def __init__(self):
        self.steps = []

    def on_train_step_end(self, trainer, module):
        if trainer.is_log_step:
            self.steps.append(trainer.global_step)


def on_several_ranks():
    module = Model()
    amounts = {"max_tokens": 333, "val_check_interval": "50 tokens", "log_every_n_steps": "50 tokens"}
    trainer = quiet(strategy="ddp", devices="auto", callbacks=(logged := LoggedSteps()), **amounts)
    batches = TokenBatchSampler(LENGTHS, max_tokens=30, seed=1, multiple_of=2)
    trainer.fit(
        module, DataLoader(TEXTS, batch_sampler=batches, collate_fn=pad), DataLoader(TEXTS[:1], 1, collate_fn=pad)
    )
    validated = [tokens for _, tokens in module.validated]
    return module.steps, trainer.tokens_seen, trainer.global_step, validated, logged.steps


def test_tokens_of_all_ranks_count():
    first, second = run_ranks(on_several_ranks, 2, timeout=120)
    together = [sum(pair) for pair in zip(first[0], second[0], strict=True)]
    assert first[1] == second[1] == sum(together) >= 333 > sum(together[:-1])
    assert first[2] == second[2] == len(together)
    seen = torch.tensor(together).cumsum(0).tolist()
    assert first[3] == [now for before, now in zip([0, *seen], seen, strict=False) if now // 50 > before // 50]
    assert first[4] == second[4] == due_steps(seen, 50)


class Budgeted(Model):
    """Notes the tokens of each micro-batch, and the step that it belongs to; its loss is a mean over tokens."""

    def training_step(self, batch, batch_idx):
        self.steps.append((self.trainer.global_step, int(batch["attention_mask"].sum())))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return Loss((self.embedding(ids)[..., 0].square() * mask).sum(), mask.sum())


def by_step(*ranks):
    """Return the tokens of each micro-batch of all ranks, in lists by step."""
    steps = {}
    for parts in zip(*ranks, strict=True):
        assert len({step for step, _ in parts}) == 1  # as many micro-batches on each rank
        steps.setdefault(parts[0][0], []).append(sum(tokens for _, tokens in parts))
    return list(steps.values())


def fit_to_a_budget(ckpt_path=None, folder=None, **settings):
    seed_everything(3)
    module = Budgeted()
    trainer = quiet(devices="auto", accumulate_tokens=60, max_epochs=2, **settings)
    trainer.fit(module, DataLoader(TEXTS, 2, shuffle=True, collate_fn=pad), ckpt_path=ckpt_path)
    if folder is not None:
        trainer.save_checkpoint(folder)
    return module.steps, module.embedding.weight.detach(), trainer.tokens_seen


def budgets_on_ranks(folder):
    whole = fit_to_a_budget(strategy="ddp")
    first = fit_to_a_budget(folder=f"{folder}/at.ckpt", strategy="ddp", max_steps=4)
    rest = fit_to_a_budget(f"{folder}/at.ckpt", strategy="ddp")
    return whole, first[0] + rest[0], rest[1]


def weight_by_hand(steps):
    """Return the weights after steps of these numbers of micro-batches, each the mean over all of its tokens."""
    seed_everything(3)
    module = Budgeted()
    optimizer = module.configure_optimizers()
    seen = iter(loader_order())
    for step in steps:
        texts = [TEXTS[index] for _ in step for index in next(seen)]
        batch = pad(texts)
        squares = module.embedding(batch["input_ids"])[..., 0].square() * batch["attention_mask"]
        (squares.sum() / batch["attention_mask"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.embedding.weight.detach()


def loader_order():
    """Return the indices of the micro-batches of two epochs, as one process reads them."""
    order = Shuffled(len(TEXTS), 3)
    for epoch in range(2):
        indices = list(order.entries(epoch, 0))
        yield from (indices[start : start + 2] for start in range(0, len(indices), 2))


def test_a_step_has_as_many_micro_batches_as_reach_its_tokens(tmp_path):
    def check(steps):
        assert len([step for step in steps if sum(step) < 60]) <= 2  # the last one of each epoch
        assert len({len(step) for step in steps}) > 1
        assert all(sum(step[:-1]) < 60 for step in steps)

    steps, weight, tokens = fit_to_a_budget()
    check(by_step(steps))
    assert tokens == 2 * sum(LENGTHS)
    assert torch.allclose(weight, weight_by_hand(by_step(steps)), atol=1e-6)
    results = run_ranks(budgets_on_ranks, 2, str(tmp_path), timeout=120)
    check(by_step(*(whole[0] for whole, _, _ in results)))
    for whole, resumed, resumed_weight in results:
        assert resumed == whole[0] and torch.equal(resumed_weight, whole[1]) and whole[2] == tokens


def test_tokens_are_those_that_are_no_padding():
    count = Model().tokens_of
    ids = torch.tensor([[5, 3, 0], [2, 0, 0]])
    assert count({"input_ids": ids, "document_ids": torch.tensor([[0, 0, -1], [0, -1, -1]])}) == 3
    assert count({"input_ids": ids, "attention_mask": (ids > 0).long()}) == 3
    assert count({"input_ids": ids}) == count((torch.zeros(2, 9), ids)) == 6
    with raises(ModuleError, "define tokens_of(self, batch) in the module"):
        count(torch.zeros(2, 3))

    class Own(Model):
        def tokens_of(self, batch):
            return 1000

    trainer = quiet(max_tokens=2500)
    trainer.fit(Own(), loader())
    assert (trainer.global_step, trainer.tokens_seen) == (3, 3000)


def test_mistakes_are_named():
    for settings, found in (
        ({"max_samples": 0}, "max_samples must be >= 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 has the wrong type"),
        ({"accumulate_tokens": 5, "accumulate_grad_batches": 2}, "accumulate_tokens=5 chooses the micro-batches"),
        ({"accumulate_tokens": 5, "global_batch_size": 2}, "accumulate_tokens=5 chooses the micro-batches"),
        ({"val_check_interval": "10 batches"}, "give '10_000 samples', '2.5M tokens' or the like"),
        ({"val_check_interval": "0 samples"}, "val_check_interval must be at least 1 sample or token"),
    ):
        with raises(ConfigError, found):
            quiet(**settings)
    with raises(ConfigError, "train_time_interval must be a timedelta, or samples or tokens", "got '5 steps'"):
        ModelCheckpoint(train_time_interval="5 steps")
