"""State in few bits is kept as it is: saved, killed, resumed to the same bit, and on other layouts."""

import warnings

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from resuming import Killed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, TrainModule
from echelon.common.errors import ProcessError
from echelon.strategies.wrapped.wrapped_tensors import is_wrapped, take_apart
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

pytest.importorskip("torchao")

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


class Net(TrainModule):
    def __init__(self, kind, rows=96):
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(128, rows), nn.Linear(rows, 8))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        import torchao.optim

        return getattr(torchao.optim, self.kind)(self.parameters(), 1e-2)


@pytest.fixture(autouse=True)
def undone():
    """Undo what `quiet` sets where a test trains in this process."""
    with warnings.catch_warnings():
        yield
    torch.compiler.set_stance("default")


def quiet():
    calm_down()
    torch.compiler.set_stance("force_eager")  # compiling each optimizer would take longer than all steps
    warnings.simplefilter("ignore")


def fit(folder, strategy, kind, epochs, resumed=None, callbacks=(), rows=96, **saving):
    """Train, save what the run has at its end once more, and return that state."""
    quiet()
    data = TensorDataset(torch.randn(24, 128, generator=torch.Generator().manual_seed(2)))
    saver = ModelCheckpoint(folder, save_last=True, **saving)
    settings = {"strategy": strategy, "precision": "32-true", "enable_checkpointing": True}
    trainer = double_trainer(max_epochs=epochs, callbacks=[saver, *callbacks], **settings)
    trainer.fit(Net(kind, rows), DataLoader(data, 12 // world_size()), ckpt_path=resumed)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return load(f"{folder}/end.ckpt", parts=["model", "optimizers"])


def is_same(one, other):
    """Return whether two states are bitwise the same, and made of the same classes."""
    if isinstance(one, torch.Tensor):
        if is_wrapped(one) and is_wrapped(other):
            ours, theirs = take_apart(one), take_apart(other)
            return ours.kind is theirs.kind and is_same(ours.tensors, theirs.tensors) and ours.shape == theirs.shape
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def bits(state, name="net.0.weight"):
    return type(state["optimizers"][0]["state"][name]["exp_avg"]).__name__


def layouts():
    return ("ddp", "zero", "fsdp") if world_size() > 1 else ("single",)


def begun(base):
    """Train without interruption, and up to the middle; return the end states, by layout and optimizer."""
    found = {}
    for strategy in layouts():
        for kind in KINDS:
            found[strategy, kind] = fit(f"{base}/{strategy}/{kind}/whole", strategy, kind, 3)
            fit(f"{base}/{strategy}/{kind}/part", strategy, kind, 2)
    return found


def gone_on(base):
    return {
        (strategy, kind): fit(f"{base}/{strategy}/{kind}/part", strategy, kind, 3, "last")
        for strategy in layouts()
        for kind in KINDS
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_low_bit_state_is_kept_and_a_resumed_run_is_bitwise_the_same(memory_path, ranks):
    if ranks == 1:
        whole, resumed = begun(str(memory_path)), gone_on(str(memory_path))
    else:
        whole, resumed = (run_ranks(work, ranks, str(memory_path))[0] for work in (begun, gone_on))
    for case, state in whole.items():
        assert bits(state) == f"OptimState{case[1].removeprefix('AdamW').lower().replace('fp', 'Fp')}", case
        assert is_same(state, resumed[case]), case


def killed(base, strategy):
    folder = f"{base}/{strategy}"
    return fit(folder, strategy, "AdamW8bit", 3, callbacks=[Killed(folder)])


def after_the_kill(base, strategy):
    resumed = fit(f"{base}/{strategy}", strategy, "AdamW8bit", 3, "last")
    return resumed, fit(f"{base}/{strategy}/whole", strategy, "AdamW8bit", 3)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_killed_run_with_a_low_bit_optimizer_goes_on_bitwise(memory_path, strategy, ranks):
    with pytest.raises(ProcessError, match="SIGKILL|signal 9|killed"):
        run_ranks(killed, ranks, str(memory_path), strategy)
    resumed, whole = run_ranks(after_the_kill, ranks, str(memory_path), strategy)[0]
    assert is_same(resumed, whole)


def on_layout(base, resumes, rows, kinds=KINDS):
    """Return, by optimizer, what a run on this layout holds, and what it says when it resumes from last.ckpt."""
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("echelon").addHandler(handler)
    strategy = "fsdp" if world_size() > 1 else "single"
    saved = {kind: f"{base}/{kind}/last.ckpt" if resumes else None for kind in kinds}
    states = {kind: fit(f"{base}/{kind}", strategy, kind, 1, saved[kind], rows=rows) for kind in kinds}
    logging.getLogger("echelon").removeHandler(handler)
    return states, [text for text in said if "quantization block" in text]


def test_aligned_blocks_stay_quantized_bit_for_bit_from_two_ranks_to_three_to_one(memory_path):
    two, _ = run_ranks(on_layout, 2, str(memory_path), False, 96)[0]
    three, said = run_ranks(on_layout, 3, str(memory_path), True, 96)[0]
    for kind in KINDS:  # what three ranks loaded is what one will load
        (memory_path / kind / "last.ckpt").unlink()
        (memory_path / kind / "end.ckpt").rename(memory_path / kind / "last.ckpt")
    one, said_by_one = on_layout(str(memory_path), True, 96)
    assert said == said_by_one == []
    for kind in KINDS:
        assert is_same(two[kind], three[kind])
        assert is_same(two[kind], one[kind])
        assert bits(one[kind]).startswith("OptimState")


def test_what_a_layout_cuts_inside_a_block_is_dequantized_and_said(memory_path):
    # 97 rows: torchao quantizes only the second of two shards, and a third of it ends inside a block
    two, _ = run_ranks(on_layout, 2, str(memory_path), False, 97, ("AdamW8bit",))[0]
    three, (said,) = run_ranks(on_layout, 3, str(memory_path), True, 97, ("AdamW8bit",))[0]
    held, loaded = (state["AdamW8bit"]["optimizers"][0]["state"] for state in (two, three))
    assert "2 tensors" in said
    assert "optimizers[0]['state']['net.0.weight']['exp_avg']" in said
    for name in ("net.0.weight", "net.0.bias", "net.1.weight"):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(loaded[name][key], held[name][key], rtol=0, atol=0)
    _, said_by_two = run_ranks(on_layout, 2, str(memory_path), True, 97, ("AdamW8bit",))[0]
    assert said_by_two == []
    files = [memory_path / "AdamW8bit" / name for name in ("last.ckpt", "end.ckpt")]
    saved, again = (load(file, parts=["optimizers"], wrapped="opened") for file in files)
    assert is_same(saved, again)  # on its own layout, mixed as it was
    blocks = again["optimizers"][0]["state"]["net.0.weight"]["exp_avg"]["blocks"]
    assert ["class" in block for _, block in sorted(blocks.items())] == [False, True]
    one, (said_by_one,) = on_layout(str(memory_path), True, 97, ("AdamW8bit",))
    assert "2 tensors" in said_by_one
    assert bits(one["AdamW8bit"]) == "Tensor"


def test_low_bit_states_are_kept_in_one_file(memory_path):
    whole = fit(memory_path / "whole", "single", "AdamW4bit", 2)
    fit(memory_path / "part", "single", "AdamW4bit", 1, single_file=True)
    assert (memory_path / "part" / "last.ckpt").is_file()
    assert is_same(fit(memory_path / "part", "single", "AdamW4bit", 2, "last", single_file=True), whole)
    read = torch.load(memory_path / "part" / "last.ckpt", weights_only=True)
    moment = read["optimizer_states"][0]["state"][0]["exp_avg"]["blocks"]["0"]
    assert moment["class"] == "torchao.optim.subclass_4bit:OptimState4bit"
    assert moment["tensors"]["codes"].dtype == torch.uint8
