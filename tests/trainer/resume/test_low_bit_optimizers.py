"""State in few bits is kept as it is: saved, killed, resumed to the same bit, and on other layouts."""

import warnings

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from resuming import Killed
from sweep import IS_SWEEP, dealt
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


LAYOUTS = ("ddp", "zero", "fsdp")
CASES = {1: [("single", kind) for kind in KINDS], 2: dealt(LAYOUTS if IS_SWEEP else LAYOUTS[:2], KINDS, [1])}
"""Strategies and optimizers, by the number of ranks; a run with shards is killed below."""


def kept(base):
    """Return the ends of each run: one that was not interrupted, and one that goes on from its middle."""
    found = {}
    for strategy, kind in CASES[world_size()]:
        place = f"{base}/{strategy}/{kind}"
        whole = fit(f"{place}/whole", strategy, kind, 2)
        fit(f"{place}/part", strategy, kind, 1)
        found[strategy, kind] = whole, fit(f"{place}/part", strategy, kind, 2, "last")
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", CASES)
def test_low_bit_state_is_kept_and_a_resumed_run_is_bitwise_the_same(memory_path, ranks):
    found = kept(str(memory_path)) if ranks == 1 else run_ranks(kept, ranks, str(memory_path))[0]
    for case, (whole, resumed) in found.items():
        assert bits(whole) == f"OptimState{case[1].removeprefix('AdamW').lower().replace('fp', 'Fp')}", case
        assert is_same(whole, resumed), case


def killed(base, strategy):
    folder = f"{base}/{strategy}"
    return fit(folder, strategy, "AdamW8bit", 2, callbacks=[Killed(folder)])


def after_the_kill(base, strategy):
    resumed = fit(f"{base}/{strategy}", strategy, "AdamW8bit", 2, "last")
    return resumed, fit(f"{base}/{strategy}/whole", strategy, "AdamW8bit", 2)


KILLED = [("fsdp", 2), ("single", 1), ("ddp", 2)]


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "ranks"), KILLED if IS_SWEEP else KILLED[:1])
def test_a_killed_run_with_a_low_bit_optimizer_goes_on_bitwise(memory_path, strategy, ranks):
    with pytest.raises(ProcessError, match="SIGKILL|signal 9|killed"):
        run_ranks(killed, ranks, str(memory_path), strategy)
    resumed, whole = run_ranks(after_the_kill, ranks, str(memory_path), strategy)[0]
    assert is_same(resumed, whole)


SIZES = {96: KINDS, 97: KINDS[:1]}
"""Optimizers by rows of the first layer.

Of 97 torchao quantizes only the second of two shards, and a third of it ends inside a block.
"""


def on_layout(base, resumes, sizes=SIZES):
    """Return, by rows, what a run on this layout holds with each optimizer, and what it says as it resumes."""
    import logging

    found, said = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("echelon").addHandler(handler)
    strategy = "fsdp" if world_size() > 1 else "single"
    for rows in sizes:
        said.clear()
        folders = {kind: f"{base}/{rows}/{kind}" for kind in SIZES[rows]}
        saved = {kind: f"{folder}/last.ckpt" if resumes else None for kind, folder in folders.items()}
        states = {kind: fit(folders[kind], strategy, kind, 1, saved[kind], rows=rows) for kind in folders}
        found[rows] = states, [text for text in said if "quantization block" in text]
    logging.getLogger("echelon").removeHandler(handler)
    return found


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Return the folder of runs, and what they hold on two ranks, and on three that resume them."""
    folder = tmp_path_factory.mktemp("layouts")
    return folder, *(run_ranks(on_layout, ranks, str(folder), ranks == 3)[0] for ranks in (2, 3))


def test_aligned_blocks_stay_quantized_bit_for_bit_from_two_ranks_to_three_to_one(layouts):
    folder, (two, _), (three, said) = layouts[0], *(found[96] for found in layouts[1:])
    for kind in KINDS:  # what three ranks loaded is what one will load
        (folder / "96" / kind / "last.ckpt").unlink()
        (folder / "96" / kind / "end.ckpt").rename(folder / "96" / kind / "last.ckpt")
    one, said_by_one = on_layout(str(folder), True, [96])[96]
    assert said == said_by_one == []
    for kind in KINDS:
        assert is_same(two[kind], three[kind])
        assert is_same(two[kind], one[kind])
        assert bits(one[kind]).startswith("OptimState")


def test_what_a_layout_cuts_inside_a_block_is_dequantized_and_said(layouts):
    folder, (two, _), (three, (said,)) = layouts[0], *(found[97] for found in layouts[1:])
    held, loaded = (state["AdamW8bit"]["optimizers"][0]["state"] for state in (two, three))
    assert "2 tensors" in said
    assert "optimizers[0]['state']['net.0.weight']['exp_avg']" in said
    for name in ("net.0.weight", "net.0.bias", "net.1.weight"):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(loaded[name][key], held[name][key], rtol=0, atol=0)
    _, said_by_two = run_ranks(on_layout, 2, str(folder), True, [97])[0][97]
    assert said_by_two == []
    files = [folder / "97" / "AdamW8bit" / name for name in ("last.ckpt", "end.ckpt")]
    saved, again = (load(file, parts=["optimizers"], wrapped="opened") for file in files)
    assert is_same(saved, again)  # on its own layout, mixed as it was
    blocks = again["optimizers"][0]["state"]["net.0.weight"]["exp_avg"]["blocks"]
    assert ["class" in block for _, block in sorted(blocks.items())] == [False, True]
    one, (said_by_one,) = on_layout(str(folder), True, [97])[97]
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
