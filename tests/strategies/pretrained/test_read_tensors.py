"""Which parameters still have the values of files: whatever changes one, or copies it, ends that."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import echelon
from echelon.strategies.module.deferred_init import DeferredInit
from echelon.strategies.pretrained.read_tensors import names_read

NAMES = {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(1)
    save_file(built().state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def built():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def give_other_memory_twice(model):
    model[0].weight.data = model[0].weight.data + 1
    model[0].weight.data = model[0].weight.data - 1  # may well lie where the first memory was


CHANGES = {
    "in place": lambda model: nn.init.zeros_(model[0].weight),
    "through data": give_other_memory_twice,
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 3))),
}


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_was_changed_is_no_longer_one_of_them(folder, change, is_deferred):
    deferred = DeferredInit()
    with deferred.recording() if is_deferred else torch.device("cpu"):
        model = echelon.load_pretrained(built(), folder)
        before = names_read(nn.ModuleDict({"inner": model}))
        with torch.no_grad():
            CHANGES[change](model)
    assert before == {f"inner.{name}" for name in NAMES}
    assert names_read(model) == NAMES - {"0.weight"}


def test_neither_what_was_not_read_nor_buffers_are_of_them(folder):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4))
    echelon.load_pretrained(model, folder, resize=["0.weight", "0.bias"], ignore="1.bias")
    assert names_read(model) == {"1.weight"}
    assert names_read(built()) == frozenset()


def test_a_dtype_that_is_asked_for_is_no_change_and_one_that_comes_later_is(folder):
    model = echelon.load_pretrained(built(), folder, torch.bfloat16)
    assert names_read(model) == NAMES
    assert names_read(model.float()) == frozenset()


def test_a_tied_parameter_has_both_names_and_a_second_folder_adds_its_own(folder):
    model = echelon.load_pretrained(built(), folder, ignore="1")
    echelon.load_pretrained(model, folder, ignore="0")
    model.append(nn.Linear(3, 4))
    model[2].weight = model[0].weight
    assert names_read(model) == NAMES | {"2.weight"}


def test_copies_know_of_none(folder):
    model = echelon.load_pretrained(built(), folder)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert names_read(other) == frozenset()
        assert torch.equal(other[0].weight, model[0].weight)
    assert names_read(model) == NAMES
