"""The advice on what the time of steps goes to: it names what pays when it is followed, and is silent otherwise."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small import quiet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from echelon import ActivationCheckpointing, Callback, CSVLogger, GoodputMonitor, Trainer, TrainModule
from echelon.callbacks.goodput.ledger import read_ledger
from echelon.testing import run_ranks
from echelon.trainer import savings
from echelon.trainer.cli.main import main
from echelon.trainer.savings.advisor import MEASURED, WARM_UP, TimeAdvisor, _Step, _summarize_steps
from echelon.trainer.savings.kinds import EXPLANATIONS

STEPS = MEASURED + WARM_UP + 3


class Many(TrainModule):
    """A module of many tensors, whose forward uses few of their elements."""

    def __init__(self, number: int = 40, size: int = 20_000, **options: Any) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((size,), 0.1) for _ in range(number)])
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack([part[:2].sum() for part in self.parts]).sum() * batch[0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3, **self.options)


class Deep(TrainModule):
    """Wide layers, trained by an update of one operator."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3, fused=True)


class Masked(Deep):
    """The same on the rows of transformers' batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch["x"]).square().mean()


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def rows(number: int, width: int = 64) -> TensorDataset:
    return TensorDataset(torch.full((number, width), 0.5))


def found(module: TrainModule, loader: Any, **settings: Any) -> dict[str, Any]:
    """Train long enough for advice; return the savings that were found, by their kinds."""
    recomputes, compiles = settings.pop("recomputes", None), bool(settings.get("compile"))
    advisor = TimeAdvisor(seconds=0.0, recomputes=recomputes, compiles=compiles)
    callbacks = [advisor, *settings.pop("callbacks", [])]
    quiet(**{"max_steps": STEPS, "callbacks": callbacks, **settings}).fit(module, loader)
    return {saving.kind: saving for saving in advisor.savings}


def operators(optimizer: torch.optim.Optimizer, module: nn.Module) -> int:
    """Return how many operators an update calls."""
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    with Calls() as calls:
        optimizer.step()
    return calls.number


# --- the optimizer ---------------------------------------------------------------------------------------------------


def test_an_optimizer_that_loops_is_named_and_following_it_leaves_few_operators():
    saving = found(Many(), DataLoader(rows(STEPS), 1))["optimizer"]
    assert "fused=True" in saving.text and "AdamW takes " in saving.text and 0.05 <= saving.share < 1
    plain, fused = Many(), Many(fused=True)
    assert operators(fused.configure_optimizers(), fused) < operators(plain.configure_optimizers(), plain) / 10


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_an_optimizer_that_does_not_loop_is_not_named(options):
    assert "optimizer" not in found(Many(**options), DataLoader(rows(STEPS), 1))


def test_an_optimizer_of_the_user_is_not_named():
    class Own(torch.optim.AdamW):
        """An optimizer whose arguments are its own."""

    class Owned(Many):
        def configure_optimizers(self):
            return Own(self.parameters(), 1e-3)

    assert "optimizer" not in found(Owned(), DataLoader(rows(STEPS), 1))


def test_what_a_watch_does_not_know_ends_its_look_and_not_the_run():
    class Closed(torch.optim.SGD):
        def register_step_post_hook(self, hook):
            raise NotImplementedError("no hooks after a step")

    class Rows(dict):
        def get(self, key, default=None):
            if key == "attention_mask":
                raise RuntimeError(f"there is no {key}")
            return super().get(key, default)

    class Odd(Masked):
        def configure_optimizers(self):
            return Closed(self.parameters(), 1e-3)

    module = Odd()
    advisor = TimeAdvisor(seconds=0.0)
    trainer = quiet(max_steps=STEPS, callbacks=[advisor])
    trainer.fit(module, DataLoader(rows(STEPS), 1, collate_fn=lambda given: Rows(x=torch.stack([x for (x,) in given]))))
    assert trainer.global_step == STEPS
    assert not {saving.kind for saving in advisor.savings} & {"optimizer", "padding"}
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_hooks_are_gone_from_the_optimizer_and_the_layers_after_the_advice():
    module, held = Many(), []

    class Look(Callback):
        def on_train_step_end(self, trainer, module):
            held.append(len(trainer.optimizers[0]._optimizer_step_pre_hooks))

    found(module, DataLoader(rows(STEPS), 1), callbacks=[Look()])
    assert held[:WARM_UP] == [0] * WARM_UP and held[WARM_UP] > 0 and held[-1] == 0


# --- the loader ------------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """Samples that take a while, twice as long as what is done between them: a wait, or the work of a processor."""

    def __init__(self, number: int, seconds: float = 0.02) -> None:
        self.number, self.seconds, self.reads = number, seconds, 0
        self.last = float("inf")

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.reads += 1
        time.sleep(max(self.seconds, 2 * (time.monotonic() - self.last)))
        self.last = time.monotonic()
        return (torch.full((64,), 0.5),)


class Working(Slow):
    def __getitem__(self, index: int) -> tuple[Tensor]:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return (torch.full((64,), 0.5),)


def test_a_slow_loader_is_named_and_following_it_reads_in_other_processes(monkeypatch):
    # other programs on this machine may interrupt each step, of which the wall clock then tells nothing
    monkeypatch.setattr("echelon.trainer.savings.advisor.num_interruptions", lambda: 0)
    data = Slow(STEPS)
    saving = found(Deep(), DataLoader(data, 1))["loader"]
    assert "num_workers=" in saving.text and data.reads == STEPS
    number = int(saving.text.partition("num_workers=")[2].partition(")")[0])
    data = Slow(2)
    quiet(max_steps=2).fit(Deep(), DataLoader(data, 1, num_workers=number))
    assert data.reads == 0


def test_a_fast_loader_is_not_named():
    assert "loader" not in found(Deep(256, 6), DataLoader(rows(STEPS * 64, 256), 64))


@pytest.fixture
def threads():
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("number", "interruptions"), [(1, 0), (1, 3), (4, 0)])
def test_a_step_is_judged_by_calm_ones_or_by_one_thread(threads, number, interruptions):
    threads(number)
    steps = [_Step(step=2.0, wait=0.5, busy=1.0, busy_wait=0.1, interruptions=interruptions)] * MEASURED
    times = _summarize_steps(steps, torch.device("cpu"), has_workers=False)
    assert (times.step, times.wait) == ((1.0, 0.0) if interruptions else (2.0, 0.5))


def test_interrupted_threads_tell_nothing(threads):
    threads(4)
    steps = [_Step(step=2.0, wait=0.5, busy=1.0, busy_wait=0.1, interruptions=1)] * MEASURED
    assert _summarize_steps(steps, torch.device("cpu"), has_workers=False) is None


def test_reading_that_needs_a_processor_which_is_not_there_is_not_named():
    threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        assert "loader" not in found(Deep(), DataLoader(Working(STEPS, 0.01), 1))
    finally:
        torch.set_num_threads(threads)


def test_the_time_of_a_callback_of_the_user_is_not_taken_for_that_of_the_loader():
    class Busy(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            time.sleep(0.01)

    assert "loader" not in found(Deep(), DataLoader(rows(STEPS), 1), callbacks=[Busy()])


def test_the_time_of_a_transfer_hook_is_not_taken_for_that_of_the_loader():
    class Augmented(Deep):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            time.sleep(0.01)
            return batch

    assert "loader" not in found(Augmented(), DataLoader(rows(STEPS), 1))


# --- padding ---------------------------------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Rows of some length, padded to a width."""

    def __init__(self, lengths: list[int], width: int) -> None:
        self.lengths, self.width = lengths, width

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(self.width) < self.lengths[index]).long()
        return {"x": torch.full((self.width, 64), 0.5), "attention_mask": mask}


def test_columns_of_padding_alone_are_named_with_the_share_that_cutting_them_off_saves():
    saving = found(Masked(), DataLoader(Texts([8, 12] * STEPS, 48), 2))["padding"]
    assert "longest row" in saving.text and "79% of the tokens" in saving.text
    assert "75% of all" in saving.text  # 48 - 12 columns of 48


def test_rows_of_different_length_are_named_with_what_sorting_them_saves():
    saving = found(Masked(), DataLoader(Texts([2, 48] * STEPS, 48), 2))["padding"]
    assert "TokenBatchSampler" in saving.text
    assert "48% of all" in saving.text  # half of the batches have rows of 2 alone


@pytest.mark.parametrize("lengths", [[48, 48], [47, 48]])
def test_batches_with_little_padding_are_not_named(lengths):
    assert "padding" not in found(Masked(), DataLoader(Texts(lengths * STEPS, 48), 2))


# --- micro-batches, precision, recomputation -------------------------------------------------------------------------


def test_small_micro_batches_are_named_and_following_it_halves_the_calls():
    width, calls = 1024, []

    class Counted(Deep):
        def training_step(self, batch, batch_idx):
            calls.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    saving = found(
        Counted(width, 2), DataLoader(rows(16 * STEPS, width), 4), accumulate_grad_batches=4, max_steps=STEPS
    )["micro-batches"]
    assert "batch_size=8 with accumulate_grad_batches=2" in saving.text
    before = len(calls)
    found(Counted(width, 2), DataLoader(rows(16 * STEPS, width), 8), accumulate_grad_batches=2, max_steps=STEPS)
    assert before == 4 * STEPS and len(calls) - before == 2 * STEPS


def test_micro_batches_of_many_rows_or_without_accumulation_are_not_named():
    assert "micro-batches" not in found(Deep(512, 2), DataLoader(rows(STEPS, 512), 1))
    assert "micro-batches" not in found(
        Deep(256, 2), DataLoader(rows(2 * 512 * STEPS, 256), 512), accumulate_grad_batches=2
    )


def test_a_faster_precision_is_named_only_where_it_takes_fewer_processor_seconds():
    width, number = 768, 256
    savings = found(Deep(width, 2), DataLoader(rows(number * STEPS, width), number))

    def seconds(dtype: torch.dtype) -> float:
        module, given, least = Deep(width, 2), torch.full((number, width), 0.5), float("inf")
        for _ in range(6):
            began = time.process_time()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = module.training_step((given,), 0)
            loss.backward()
            least = min(least, time.process_time() - began)
        return least

    ratio = seconds(torch.bfloat16) / seconds(torch.float32)
    if "precision" in savings:
        assert "bf16-mixed" in savings["precision"].text and ratio < 1
    else:
        assert ratio > 0.6  # the products alone may be faster by less than is worth a line


def test_a_run_in_another_precision_is_not_told_of_it():
    for precision in ("bf16-mixed", "64-true"):
        savings = found(Deep(256, 2), DataLoader(rows(64 * STEPS, 256), 64), precision=precision)
        assert "precision" not in savings


def test_recomputation_without_need_is_named_and_following_it_computes_less():
    setting = ActivationCheckpointing()
    loader = DataLoader(rows(64 * STEPS, 256), 64)
    saving = found(Deep(256, 4), loader, activation_checkpointing="full", recomputes=setting)["recomputation"]
    assert "4 blocks again" in saving.text and "without activation_checkpointing" in saving.text

    def calls(**settings: Any) -> int:
        class Counting(Deep):
            def training_step(self, batch, batch_idx):
                calls.__enter__()
                return super().training_step(batch, batch_idx)

            def on_after_backward(self):
                calls.__exit__(None, None, None)

        calls = Calls()
        quiet(max_steps=1, **settings).fit(Counting(256, 4), loader)
        return calls.number

    assert calls() < calls(activation_checkpointing="full")


def test_recomputation_is_not_named_without_it_or_where_it_keeps_products():
    loader = DataLoader(rows(64 * STEPS, 256), 64)
    assert "recomputation" not in found(Deep(256, 4), loader)
    selective = ActivationCheckpointing(mode="selective")
    savings = found(Deep(256, 4), loader, activation_checkpointing=selective, recomputes=selective)
    assert "recomputation" not in savings


def test_every_kind_that_can_be_found_is_explained():
    folder = Path(savings.__file__).parent
    pattern = r"yield Saving\(\s*\"([\w-]+)\""
    named = {kind for file in folder.glob("*.py") for kind in re.findall(pattern, file.read_text())}
    assert named == set(EXPLANATIONS)


# --- when it speaks --------------------------------------------------------------------------------------------------


def lines(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "enable_advice" in record.getMessage()]


def test_one_line_is_said_and_a_switch_turns_it_off(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "echelon")
    monkeypatch.setitem(TimeAdvisor.__init__.__kwdefaults__, "seconds", 0.1)  # this program takes no ten
    module, loader = Many(100, 20_000), DataLoader(rows(STEPS + 20), 1)
    quiet(max_epochs=1).fit(module, loader)
    assert len(lines(caplog)) == 1 and "fused=True" in lines(caplog)[0]
    caplog.clear()
    quiet(max_epochs=1, enable_advice=False).fit(module, loader)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "settings", [{"max_steps": MEASURED}, {"fast_dev_run": STEPS}, {"overfit_batches": STEPS}, {"barebones": True}]
)
def test_nothing_is_said_of_short_and_trial_runs(settings, caplog):
    caplog.set_level(logging.INFO, "echelon")
    limits = {"max_epochs": 1, "accelerator": "cpu", **settings}
    if "barebones" not in settings:
        limits |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**limits)
    trainer.fit(Many(), DataLoader(rows(STEPS), 1))
    assert lines(caplog) == []
    has_advisor = any(isinstance(callback, TimeAdvisor) for callback in trainer.callbacks)
    assert has_advisor == ("max_steps" in settings)


def test_a_resumed_fit_and_the_next_one_measure_their_own_steps(tmp_path):
    loader, advisor = DataLoader(rows(2 * STEPS), 1), TimeAdvisor(seconds=0.0)
    trainer = quiet(max_steps=STEPS, callbacks=[advisor], default_root_dir=tmp_path)
    trainer.fit(Many(), loader)
    assert advisor.savings
    trainer.save_checkpoint(tmp_path / "saved")
    resumed = TimeAdvisor(seconds=0.0)
    quiet(max_steps=STEPS + 10, callbacks=[resumed]).fit(Many(), loader, ckpt_path=tmp_path / "saved")
    assert not resumed.savings  # ten steps are too few
    again = TimeAdvisor(seconds=0.0)
    quiet(max_steps=2 * STEPS, callbacks=[again]).fit(Many(), loader, ckpt_path=tmp_path / "saved")
    assert {saving.kind for saving in again.savings} >= {"optimizer"}


def test_manual_optimization_with_two_optimizers_names_the_one_that_loops():
    class Two(Many):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(64, 1)

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx) + self.other(batch[0]).mean())
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.other.parameters(), 0.1), torch.optim.Adam(self.parts, 1e-3)]

    assert found(Two(), DataLoader(rows(STEPS), 1))["optimizer"].text.startswith("Adam takes")


def test_generators_are_left_as_they_are():
    def weights(**settings: Any) -> Tensor:
        torch.manual_seed(0)

        class Noisy(Deep):
            def training_step(self, batch, batch_idx):
                return super().training_step((batch[0] + torch.rand_like(batch[0]),), batch_idx)

        module = Noisy()
        quiet(max_steps=STEPS + 5, **settings).fit(module, DataLoader(rows(STEPS + 5), 1))
        return module.blocks[0][0].weight.detach()

    assert torch.equal(weights(enable_advice=False), weights(callbacks=[TimeAdvisor(seconds=0.0)]))


def test_an_error_in_a_step_leaves_no_hooks():
    class Failing(Deep):
        def training_step(self, batch, batch_idx):
            if batch_idx == WARM_UP:
                raise ValueError("stop")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(ValueError, match="stop"):
        found(module, DataLoader(rows(STEPS), 1))
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_the_ledger_of_goodput_and_its_report_keep_the_line(tmp_path, capsys):
    monitor = GoodputMonitor()
    savings_found = found(
        Many(), DataLoader(rows(STEPS), 1), callbacks=[monitor], default_root_dir=tmp_path, logger=CSVLogger(tmp_path)
    )
    text = max(savings_found.values(), key=lambda saving: saving.share).text
    ledger = next(tmp_path.rglob("goodput.jsonl"))
    assert [one.advice for one in read_ledger(ledger).rounds] == [text]
    assert main(["goodput", str(ledger.parent), "--png", str(tmp_path / "figure.png")]) == 0
    assert "Advice: " in capsys.readouterr().out
    assert main(["goodput", str(ledger.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"][0]["advice"] == text


def test_doctor_explains_each_kind(capsys):
    assert main(["doctor", "--advice"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{kind}: " in printed for kind in EXPLANATIONS)
    assert main(["doctor", "--advice", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dict(EXPLANATIONS)


def fit_on_two_ranks(strategy: str) -> list[str]:
    """Train on a rank; return the kinds that it has found."""
    torch.set_num_threads(1)
    advisor = TimeAdvisor(seconds=0.0)
    trainer = quiet(max_steps=STEPS, callbacks=[advisor], strategy=strategy, devices=2)
    trainer.fit(Many(8, 100_000), DataLoader(rows(2 * STEPS), 1))
    return [saving.kind for saving in advisor.savings]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_rank_0_alone_measures_and_says_it(strategy):
    first, second = run_ranks(fit_on_two_ranks, 2, strategy, timeout=300)
    assert "optimizer" in first and second == []
