"""Frozen weights that never change are left out of checkpoints, found again where the module has them, or refused."""

import pytest
import torch
from as_rank import calm_down, double_trainer
from resuming import Killed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    OmitFrozenWeights,
    TrainModule,
    export,
    load_weights,
)
from echelon.common.errors import CheckpointError, ProcessError
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.state.omitted_weights import digests_of
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load
from echelon.trainer.cli.checkpoint_contents import compare_checkpoints, show_checkpoint, verify_all

ALONE = Collectives(None, torch.device("cpu"))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, width, rank=1):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(TrainModule):
    """Built on a base of its own seed, as pretrained weights are."""

    def __init__(self, width=34, seed=1, rank=1):
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        torch.manual_seed(seed)
        self.layers = nn.Sequential(Adapted(width, rank), Adapted(width, rank))
        self.register_buffer("scale", torch.ones(()))

    def test_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def training_step(self, batch, batch_idx):
        return self.scale * self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


def fit(module, folder, *callbacks, max_epochs=2, resumed=None, omits=True, **settings):
    width = getattr(module, "width", 34)
    dtype = torch.float32 if settings.get("precision") == "32-true" else torch.float64
    drawn = torch.randn(12, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = TensorDataset(drawn.to(dtype))
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=-1)
    omitting = [OmitFrozenWeights()] if omits else []
    settings = {"enable_checkpointing": True, "global_batch_size": 6, **settings}
    trainer = double_trainer(max_epochs=max_epochs, callbacks=[*omitting, *callbacks, saver], **settings)
    trainer.fit(module, DataLoader(data, 3), ckpt_path=resumed)
    return trainer


BASE = [f"layers.{layer}.base.{name}" for layer in (0, 1) for name in ("weight", "bias")]


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}


def rounded(trainer):
    """Return the weights in the dtype in which a module is built."""
    return {name: value.float() for name, value in weights_of(trainer).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


# --- layouts


def whole(folder, strategy):
    calm_down()
    return weights_of(fit(Net(), f"{folder}/{strategy}-whole", strategy=strategy, omits=False))


def killed(folder, strategy):
    calm_down()
    fit(Net(), f"{folder}/{strategy}", Killed(f"{folder}/{strategy}"), strategy=strategy)


def resumed(folder, strategy):
    calm_down()
    return whole(folder, strategy), weights_of(fit(Net(), f"{folder}/{strategy}", strategy=strategy, resumed="last"))


@pytest.mark.parametrize(
    ("strategy", "ranks"), [pytest.param("single", 1, marks=pytest.mark.only_in_sweep), ("ddp", 2), ("fsdp", 2)]
)
def test_a_killed_run_goes_on_bitwise_without_the_base_in_its_checkpoint(memory_path, strategy, ranks):
    with pytest.raises(ProcessError, match="SIGKILL|signal 9|killed"):
        run_ranks(killed, ranks, str(memory_path), strategy)
    saved = load(memory_path / strategy / "last.ckpt")
    assert sorted(saved["omitted_weights"]) == sorted(BASE)
    assert not set(saved["model"]) & set(BASE)
    expected, found = run_ranks(resumed, ranks, str(memory_path), strategy)[0]
    assert_same(found, expected)
    digests = digests_of({name: expected[name] for name in BASE}, ALONE)
    assert digests == {name: entry["digest"] for name, entry in saved["omitted_weights"].items()}


LAYOUTS = ("ddp", "fsdp", "zero")


def elsewhere(folder):
    """Resume on each layout what another one has saved; return the weights, by the layout."""
    calm_down()
    return {name: weights_of(fit(Net(), f"{folder}/{name}", strategy=name, resumed="last")) for name in LAYOUTS}


def test_a_checkpoint_without_the_base_is_resumed_on_other_layouts(memory_path):
    fit(Net(), memory_path / "run", max_epochs=1)
    expected = weights_of(fit(Net(), memory_path / "run", resumed=memory_path / "run" / "last.ckpt"))
    for strategy in LAYOUTS:
        fit(Net(), memory_path / strategy, max_epochs=1)
    for strategy, weights in run_ranks(elsewhere, 2, str(memory_path))[0].items():
        for name, value in weights.items():
            told = f"{name} under {strategy}"
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=lambda text, n=told: n + text)


def digests_of_shards():
    """Return the digests of tensors, whole and in shards of several layouts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [(line, [Shard(0)]), (line, [Shard(1)]), (square, [Replicate(), Shard(0)])]
    layouts.append((square, [Shard(0), Shard(1)]))

    class Gathered(Collectives):
        def all_gather_object(self, value):
            found = [None] * 4
            dist.all_gather_object(found, value)
            return found

    collectives = Gathered(None, torch.device("cpu"))
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64):
        torch.manual_seed(0)
        whole = (torch.randn(37, 23, 3) * 50).to(dtype)
        tensors = {str(number): distribute_tensor(whole, *layout) for number, layout in enumerate(layouts)}
        found[dtype] = {**digests_of(tensors, collectives), "whole": digests_of({"a": whole}, ALONE)["a"]}
    dist.destroy_process_group()
    return found


def test_digests_are_the_same_on_every_layout_and_others_for_other_values():
    for digests in run_ranks(digests_of_shards, 4)[0].values():
        assert len(digests) == 5
        assert len(set(digests.values())) == 1
    tensor = torch.randn(300, 500)
    changes = [tensor.flip(0), tensor.flip(1), -tensor, tensor.t().contiguous().view(300, 500), tensor + 1e-6]
    changed = tensor.clone()
    changed[299, 499] = -changed[299, 499]
    found = digests_of({str(number): one for number, one in enumerate([tensor, *changes, changed])}, ALONE)
    assert len(set(found.values())) == 7


# --- the base


def test_another_base_is_refused_by_name_and_the_same_is_found(memory_path):
    trainer = fit(Net(), memory_path, max_epochs=1)
    path = memory_path / "last.ckpt"
    with pytest.raises(CheckpointError, match=r"leaves out 4 frozen.*4 of them have other values.*base\.weight"):
        fit(Net(seed=3), memory_path, resumed="last")
    with pytest.raises(CheckpointError, match=r"lacks layers\.0\.base\.weight of \[34, 34\], which has \[32, 32\]"):
        fit(Net(width=32), memory_path, resumed="last")
    with pytest.raises(CheckpointError, match="4 of them have other values"):
        Net.load_from_checkpoint(path, seed=3)
    with pytest.raises(CheckpointError, match="4 of them have other values"):
        double_trainer().test(Net(seed=3), DataLoader(TensorDataset(torch.randn(4, 34))), ckpt_path=path)
    assert_same(dict(Net.load_from_checkpoint(path).state_dict()), rounded(trainer))


def test_a_base_in_another_dtype_is_found_if_it_has_the_saved_values(memory_path):
    fit(Net(), memory_path, max_epochs=1, precision="bf16-true")
    saved = load(memory_path / "last.ckpt")["omitted_weights"][BASE[0]]
    assert saved["dtype"] == torch.bfloat16
    assert Net.load_from_checkpoint(memory_path / "last.ckpt").layers[0].base.weight.dtype == torch.float32


def test_weights_only_and_saves_by_hand_leave_the_base_out_too(memory_path):
    trainer = fit(Net(), memory_path, max_epochs=1)
    for weights_only in (False, True):
        trainer.save_checkpoint(memory_path / "hand.ckpt", weights_only=weights_only)
        assert sorted(load(memory_path / "hand.ckpt")["omitted_weights"]) == sorted(BASE)
    trainer.save_checkpoint(memory_path / "one.ckpt", single_file=True)
    assert_same(dict(Net.load_from_checkpoint(memory_path / "one.ckpt").state_dict()), rounded(trainer))
    assert not set(torch.load(memory_path / "one.ckpt", weights_only=True)["state_dict"]) & set(BASE)


def test_a_save_after_a_fit_in_started_processes_leaves_the_base_out(memory_path):
    trainer = fit(Net(), memory_path, max_epochs=1, strategy="ddp", devices=2)
    trainer.save_checkpoint(memory_path / "hand.ckpt")
    assert sorted(load(memory_path / "hand.ckpt")["omitted_weights"]) == sorted(BASE)


def test_readers_and_commands_follow(memory_path, caplog):
    module = Net().double()
    trainer = fit(module, memory_path, max_epochs=1)
    path = memory_path / "last.ckpt"
    assert sorted(load_weights(path)) == sorted(set(module.state_dict()) - set(BASE))
    with pytest.raises(CheckpointError, match="which? names weights that|leaves out, as its base has them"):
        load_weights(path, include="*.base.*")
    assert verify_all([path])[1]
    assert compare_checkpoints(path, path)[1]
    assert any(f"{BASE[0]}.digest" in line for line in show_checkpoint(path, shows_all=True))
    with pytest.raises(CheckpointError, match=r"leaves out 4 frozen weights .*base=.*--partial"):
        export(path, memory_path / "out")
    assert sorted(load_weights(export(path, memory_path / "part", partial=True))) == sorted(load_weights(path))
    torch.save(nn.Sequential(*Net().double().layers).state_dict(), memory_path / "base.pt")  # without a prefix
    torch.save(Net(seed=3).double().state_dict(), memory_path / "other.pt")
    with pytest.raises(CheckpointError, match="4 of them have other values"):
        export(path, memory_path / "out", base=memory_path / "other.pt")
    written = export(path, memory_path / "out", base=memory_path / "base.pt")
    assert_same(load_weights(written), weights_of(trainer))


def test_a_checkpoint_of_adapters_is_a_twentieth_of_its_base(memory_path):
    fit(Net(512, rank=2), memory_path, max_epochs=1, precision="32-true")
    module = Net(512, rank=2)
    frozen, trained = (sum(p.numel() for p in module.parameters() if p.requires_grad is on) for on in (False, True))
    assert trained / frozen < 0.01
    files = (memory_path / "last.ckpt").resolve().iterdir()
    assert sum(file.stat().st_size for file in files) <= 0.05 * 4 * frozen


# --- what is saved all the same


class WithTeacher(Net):
    """Has two frozen copies of its first layer, of which one follows."""

    def __init__(self):
        super().__init__()
        self.reference, self.teacher = nn.Linear(34, 34), nn.Linear(34, 34)
        self.reference.requires_grad_(False)
        self.teacher.requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        for parameter in self.teacher.parameters():
            parameter.data.mul_(0.5)  # as many programs do, without a trace in autograd's versions


def test_a_frozen_reference_is_left_out_and_a_teacher_that_follows_is_saved(memory_path):
    fit(WithTeacher(), memory_path, max_epochs=1)
    saved = load(memory_path / "last.ckpt")
    assert sorted(saved["omitted_weights"]) == sorted([*BASE, "reference.bias", "reference.weight"])
    expected = weights_of(fit(WithTeacher(), memory_path / "whole", omits=False))
    assert_same(weights_of(fit(WithTeacher(), memory_path, resumed="last")), expected)


class Freed(Net):
    """Trains its base as well."""

    def __init__(self):
        super().__init__()
        self.layers.requires_grad_(True)


def test_what_an_earlier_run_has_trained_is_saved_though_this_one_freezes_it(memory_path):
    module = Freed()
    fit(module, memory_path / "first", max_epochs=1, omits=False)
    module.layers[0].base.requires_grad_(False)
    fit(module, memory_path / "second", max_epochs=1)  # the same module again
    assert "omitted_weights" not in load(memory_path / "second" / "last.ckpt")
    loaded = Net.load_from_checkpoint(memory_path / "first" / "last.ckpt")
    fit(loaded, memory_path / "third", max_epochs=1)
    assert "omitted_weights" not in load(memory_path / "third" / "last.ckpt")


class WithBackbone(Net):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(34, 34)

    def training_step(self, batch, batch_idx):
        return self.layers(self.backbone(batch[0])).square().mean()


def test_what_is_unfrozen_later_is_saved_from_then_on(memory_path):
    def finetuned(folder, max_epochs, resumed=None, omits=True):
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        return fit(WithBackbone(), folder, unfreezing, max_epochs=max_epochs, resumed=resumed, omits=omits)

    finetuned(memory_path, 2)
    first, second = (load(memory_path / f"epoch={epoch}-step={2 * epoch + 2}.ckpt") for epoch in (0, 1))
    assert {"backbone.weight", "backbone.bias"} <= set(first["omitted_weights"])
    assert {"backbone.weight", "backbone.bias"} <= set(second["model"])
    expected = weights_of(finetuned(memory_path / "whole", 3, omits=False))
    again = weights_of(finetuned(memory_path / "again", 3, memory_path / "epoch=0-step=2.ckpt"))
    assert_same(again, expected)
    assert_same(weights_of(finetuned(memory_path, 3, "last")), expected)


def test_an_average_of_weights_leaves_the_base_out_in_both_orders(memory_path):
    expected = weights_of(fit(Net(), memory_path / "whole", EMAWeightAveraging(decay=0.5), omits=False))
    for name in ("first", "last"):
        for epochs in (1, 2):
            callbacks = [OmitFrozenWeights(), EMAWeightAveraging(decay=0.5)][:: 1 if name == "first" else -1]
            given = {"max_epochs": epochs, "omits": False, "resumed": None if epochs == 1 else "last"}
            found = fit(Net(), memory_path / name, *callbacks, **given)
        saved = load(memory_path / name / "last.ckpt")
        assert not (set(saved["model"]) | set(saved["trained_weights"])) & set(BASE)
        assert_same(weights_of(found), expected)


# --- quantized bases


def test_the_digest_of_a_quantized_weight_is_that_of_its_values():
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = nf4.to_nf4(torch.randn(64, 64), 64, 32)
    found = digests_of({"a": weight, "b": weight.get_original_weight()}, ALONE)
    assert found["a"] == found["b"]
