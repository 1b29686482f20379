"""By default checkpoints leave out the frozen base of a model with adapters, as far as it was read from files."""

import pytest
import torch
from as_rank import calm_down, double_trainer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon import CheckpointError, ConfigError, FSDPStrategy, ModelCheckpoint, OmitFrozenWeights, TrainModule
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

peft = pytest.importorskip("peft")

PREFIX = "model.base_model.model."
BASE = {f"{PREFIX}{name}" for name in ("0.base_layer.weight", "0.base_layer.bias", "1.weight", "1.bias")}


def plain(rows=40):
    return nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 4))


class WithAdapter(TrainModule):
    """A model that is read from a folder in configure_model, with a LoRA on its first layer."""

    def __init__(self, folder, *, rows=40, change=None, adapts=True, **lora):
        super().__init__()
        self.model, self.folder, self.rows = None, folder, rows
        self.change, self.adapts, self.lora = change, adapts, lora

    def configure_model(self):
        if self.model is not None:
            return
        # further rows of the first layer are columns of the second
        other = {} if self.rows == 40 else {"resize": "0", "ignore": "1.weight"}
        model = echelon.load_pretrained(plain(self.rows), self.folder, **other)
        if self.change is not None:
            with torch.no_grad():
                self.change(model)
        if self.adapts:
            model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["0"], **self.lora))
        else:
            model.requires_grad_(False)[1].bias.requires_grad_(True)
        self.model = model

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


@pytest.fixture
def folder(memory_path):
    torch.manual_seed(1)
    save_file(plain().state_dict(), memory_path / "model.safetensors")
    return memory_path


def fit(module, place, *callbacks, resumed=None, max_epochs=1, saver=None, **settings):
    data = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    saver = saver or ModelCheckpoint(place, save_last=True)
    torch.manual_seed(3)
    trainer = double_trainer(
        max_epochs=max_epochs,
        callbacks=[*callbacks, saver],
        enable_checkpointing=True,
        global_batch_size=4,
        **settings,
    )
    trainer.fit(module, DataLoader(data, 2), ckpt_path=resumed)
    return trainer


def omitted(place):
    """Return the names of what the last checkpoint leaves out, having checked that it holds no other base."""
    saved = load(place / "last.ckpt")
    left_out = set(saved.get("omitted_weights") or ())
    assert not left_out & set(saved["model"])
    return left_out


def test_what_was_read_is_left_out_and_that_is_told(folder, capsys):
    trainer = fit(WithAdapter(folder), folder / "run", enable_progress_bar=True)
    assert omitted(folder / "run") == BASE
    line = "Checkpoints leave out 4.19 kB of frozen weights, which load_pretrained has read and reads again; "
    assert capsys.readouterr().out.count(line + "ModelCheckpoint(frozen='keep') keeps them.\n") == 1
    trainer.save_checkpoint(folder / "by hand.ckpt")
    assert set(load(folder / "by hand.ckpt")["omitted_weights"]) == BASE
    module = WithAdapter(folder, adapts=False)
    trainer.fit(module, DataLoader(torch.zeros(4, 8, dtype=torch.float64), 2))  # the next module has none
    assert omitted(folder / "run") == set()


def orthogonal(model):
    nn.init.orthogonal_(model[1].weight)


KEPT = {
    "drawn rows": ({"rows": 41}, {f"{PREFIX}1.bias"}),
    "changed in configure_model": ({"change": orthogonal}, BASE - {f"{PREFIX}1.weight"}),
    "changed by peft": ({"init_lora_weights": "pissa"}, BASE - {f"{PREFIX}0.base_layer.weight"}),
    "trained": ({"modules_to_save": ["1"]}, BASE - {f"{PREFIX}1.weight", f"{PREFIX}1.bias"}),
    "no adapter": ({"adapts": False}, set()),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_may_be_otherwise_the_next_time_is_kept(folder, case):
    settings, expected = KEPT[case]
    fit(WithAdapter(folder, **settings), folder / "run")
    # peft keeps the original of what is trained in full beside it, frozen
    originals = {f"{PREFIX}1.original_module.{name}" for name in ("weight", "bias")}
    assert omitted(folder / "run") == expected | (originals if case == "trained" else set())
    assert fit(WithAdapter(folder, **settings), folder / "run", resumed="last", max_epochs=2).global_step == 4


@pytest.mark.parametrize(
    "chosen", [{"frozen": "keep"}, {"single_file": True}], ids=["keep", "files that others are to read"]
)
def test_all_is_kept_where_that_is_chosen(folder, chosen):
    place = folder / "run"
    fit(WithAdapter(folder), place, saver=ModelCheckpoint(place, save_last=True, **chosen))
    assert set(load(place / "last.ckpt")["model"]) >= BASE


def test_the_folder_is_the_base_of_an_export(folder):
    trainer = fit(WithAdapter(folder, modules_to_save=["1"]), folder / "run")
    written = load_file(echelon.export(folder / "run" / "last.ckpt", folder / "out", base=folder))
    state = whole_state(trainer)
    assert written.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    other = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(other, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="have other values than when it was saved"):
        echelon.export(folder / "run" / "last.ckpt", folder / "out", base=folder / "other.safetensors")
    del other["1.bias"]
    save_file(other, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.base_model\.model\.1\.original_module\.bias; build"):
        echelon.export(folder / "run" / "last.ckpt", folder / "out", base=folder / "other.safetensors")


def test_all_that_is_frozen_is_left_out_where_that_is_chosen(folder):
    place = folder / "run"
    module = WithAdapter(folder, change=orthogonal)
    fit(module, place, saver=ModelCheckpoint(place, save_last=True, frozen="omit"))
    assert omitted(place) == BASE


def test_callbacks_that_contradict_each_other_are_refused(folder):
    keep, omit = ModelCheckpoint(frozen="keep"), ModelCheckpoint(frozen="omit")
    for other, said in ((omit, "another with frozen='omit'"), (OmitFrozenWeights(), r"OmitFrozenWeights\(\)")):
        with pytest.raises(ConfigError, match=f"frozen='keep' beside {said}"):
            fit(WithAdapter(folder), folder, keep, saver=other)
    with pytest.raises(ConfigError, match="frozen must be 'keep' or 'omit', got 'drop'"):
        ModelCheckpoint(frozen="drop")
    with pytest.raises(ConfigError, match="give \\['0.weight'\\]"):
        OmitFrozenWeights("0.weight")


def whole_state(trainer):
    return {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}


LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "fsdp, read into shards": lambda: FSDPStrategy(deferred_init=True),
}


def of_layouts(folder):
    calm_down()
    found = {}
    for name, layout in LAYOUTS.items():
        place = folder / name
        straight = fit(WithAdapter(folder), folder / "whole", strategy=layout(), max_epochs=2)
        expected = whole_state(straight)
        fit(WithAdapter(folder), place, strategy=layout())
        left_out = omitted(place)
        again = fit(WithAdapter(folder), place, strategy=layout(), resumed="last", max_epochs=2)
        state = whole_state(again)
        found[name] = left_out, [key for key, value in expected.items() if not torch.equal(value, state[key])]
    return found


def test_runs_of_several_ranks_resume_bitwise_without_it(folder):
    assert run_ranks(of_layouts, 2, folder, timeout=120)[0] == dict.fromkeys(LAYOUTS, (BASE, []))
    # on another layout, from the last of them
    place = folder / "fsdp, read into shards"
    trainer = fit(WithAdapter(folder), place, resumed="last", max_epochs=3)
    assert trainer.global_step == 6 and omitted(place) == BASE


def test_processes_that_a_fit_starts_leave_it_out_too(folder):
    module = WithAdapter(folder)
    fit(module, folder / "run", strategy="ddp", devices=2)
    assert omitted(folder / "run") == BASE
    bias = dict(module.named_parameters())[f"{PREFIX}1.bias"]  # the caller has it, too
    assert torch.equal(bias.double(), load_file(folder / "model.safetensors")["1.bias"].double())
    assert fit(module, folder / "run", resumed="last", max_epochs=2).global_step == 4
