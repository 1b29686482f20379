"""Hyper-parameters are the arguments a module was created with, kept once, from which it can be created again."""

import copy
import functools
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from echelon.common.errors import ConfigError, ModuleError
from echelon.trainer.module.hparams import AttributeDict, HyperparametersMixin, init_arguments


class Net(HyperparametersMixin, nn.Module):
    def __init__(self, lr=0.1, *sizes, width: int = 4, **others):
        super().__init__()
        local = "not an argument"  # noqa: F841
        self.save_hyperparameters()


def test_all_arguments_are_kept_by_name_and_locals_are_not():
    net = Net(0.5, 1, 2, width=8, depth=3)
    assert net.hparams == {"lr": 0.5, "width": 8, "depth": 3}
    assert net.hparams.depth == net.hparams["depth"] == 3


def test_hparams_may_change_and_the_initial_ones_may_not():
    net = Net(lr=[1, {"a": 2}])
    net.hparams.lr[1]["a"] = 3
    net.hparams.width = 5
    net.hparams_initial["lr"].append(4)
    assert net.hparams == {"lr": [1, {"a": 3}], "width": 5}
    assert net.hparams_initial == {"lr": [1, {"a": 2}], "width": 4}


def test_a_base_class_that_saves_keeps_the_subclass_arguments_too_and_the_subclass_wins():
    class Sub(Net):
        def __init__(self, momentum, lr):
            super().__init__(lr * 2)

    assert Sub(0.9, lr=0.1).hparams == {"lr": 0.1, "width": 4, "momentum": 0.9}


def test_a_subclass_that_saves_adds_to_its_base_and_can_drop_what_the_base_kept():
    class Sub(Net):
        def __init__(self, backbone, lr):
            super().__init__(lr)
            self.save_hyperparameters(ignore=["backbone", "width"])

    assert Sub(nn.Linear(1, 1), lr=0.1).hparams == {"lr": 0.1}


def test_only_the_named_arguments_are_kept():
    class Some(HyperparametersMixin, nn.Module):
        def __init__(self, lr, width, depth):
            super().__init__()
            self.save_hyperparameters("lr", "width")

    assert Some(1, 2, 3).hparams == {"lr": 1, "width": 2}


def test_a_misspelt_name_is_pointed_out():
    class Misspelt(HyperparametersMixin):
        def __init__(self, learning_rate):
            self.save_hyperparameters("learning_rat")

    with pytest.raises(
        ConfigError,
        match=r"save_hyperparameters\('learning_rat'\).*Did you mean 'learning_rate'",
    ):
        Misspelt(1)


def test_a_decorated_init_is_seen_through():
    def decorate(init):
        @functools.wraps(init)
        def wrapper(*args, **kwargs):
            return init(*args, **kwargs)

        return wrapper

    class Decorated(HyperparametersMixin):
        @decorate
        def __init__(self, lr):
            self.helper()

        def helper(self):
            self.save_hyperparameters()

    assert Decorated(lr=3).hparams == {"lr": 3}


def test_an_object_made_inside_another_init_keeps_its_own_arguments_only():
    class Outer(HyperparametersMixin):
        def __init__(self, lr, name):
            self.inner = Net(lr=7)
            self.save_hyperparameters()

    outer = Outer(1, "x")
    assert outer.hparams == {"lr": 1, "name": "x"}
    assert outer.inner.hparams == {"lr": 7, "width": 4}


def test_a_dataclass_keeps_its_fields():
    @dataclass(eq=False)
    class Data(HyperparametersMixin, nn.Module):
        lr: float
        sizes: tuple = (1, 2)

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    assert Data(0.1).hparams == {"lr": 0.1, "sizes": (1, 2)}


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.1, "net": {"width": 2}},
        Namespace(lr=0.1, net={"width": 2}),
        OmegaConf.create({"lr": 0.1, "net": {"width": 2}}),
    ],
)
def test_the_items_of_a_given_object_are_kept_and_the_argument_remembered(given):
    class FromConfig(HyperparametersMixin, nn.Module):
        def __init__(self, config, extra=1):
            super().__init__()
            self.save_hyperparameters(config)

    net = FromConfig(given)
    assert net.hparams == {"lr": 0.1, "net": {"width": 2}}
    assert net.hparams_argument == "config"
    again = FromConfig(**init_arguments(FromConfig, net.hparams, net.hparams_argument))
    assert again.hparams == net.hparams


def test_what_has_no_names_cannot_be_kept():
    with pytest.raises(ConfigError, match=r"save_hyperparameters\(3\) has no names"):
        HyperparametersMixin().save_hyperparameters(3)


def test_outside_init_only_an_object_can_be_kept():
    module = HyperparametersMixin()
    module.save_hyperparameters({"lr": 1})
    assert module.hparams == {"lr": 1}
    with pytest.raises(
        ModuleError,
        match=r"save_hyperparameters\(\) was called outside HyperparametersMixin.__init__",
    ):
        module.save_hyperparameters()


def test_a_network_among_the_arguments_is_shared_and_not_registered_twice():
    backbone = nn.Linear(2, 2)
    net = Net(backbone=backbone)
    assert net.hparams_initial.backbone is backbone
    assert list(net.parameters()) == []


def test_loggers_receive_them_unless_told_otherwise():
    class Quiet(HyperparametersMixin):
        def __init__(self, lr):
            self.save_hyperparameters(logger=False)

    assert Net().hparams_logged
    assert not Quiet(1).hparams_logged
    assert not HyperparametersMixin().hparams_logged


def test_a_missing_hyper_parameter_names_the_nearest():
    with pytest.raises(
        AttributeError,
        match="no hyper-parameter 'learningrate'. Did you mean 'learning_rate'",
    ):
        AttributeDict(learning_rate=1).learningrate  # noqa: B018
    with pytest.raises(AttributeError, match="no hyper-parameter 'lr' to delete"):
        del AttributeDict(a=1).lr


def test_attribute_dicts_copy_as_dicts_do():
    kept = AttributeDict(a=[1])
    again = copy.deepcopy(kept)
    kept.a.append(2)
    del kept.a
    assert (kept, again, type(again)) == ({}, {"a": [1]}, AttributeDict)


def test_a_module_is_made_again_with_what_its_init_takes():
    class Sub(Net):
        def __init__(self, lr):
            super().__init__(lr)

    assert init_arguments(Sub, Sub(3).hparams) == {"lr": 3}
    assert init_arguments(Net, {"lr": 3, "anything": 1}) == {"lr": 3, "anything": 1}


def test_what_is_given_wins_and_reaches_into_the_config_that_was_saved():
    class FromConfig(HyperparametersMixin):
        def __init__(self, config, extra=1):
            self.save_hyperparameters(config)

    saved = FromConfig({"lr": 0.1, "width": 2})
    again = init_arguments(FromConfig, saved.hparams, saved.hparams_argument, {"lr": 0.5, "extra": 2})
    assert again == {"config": {"lr": 0.5, "width": 2}, "extra": 2}
    assert init_arguments(Net, {"lr": 3}, None, {"lr": 4}) == {"lr": 4}


@dataclass
class Inner:
    dtype: torch.dtype = torch.float32


@dataclass
class Config:
    width: int
    inner: Inner


def test_a_mapping_becomes_the_dataclass_that_an_argument_is_annotated_with():
    class Annotated(HyperparametersMixin):
        def __init__(self, config: Config | None, table: dict[str, Config]):
            self.save_hyperparameters()

    hparams = {
        "config": {"width": 2, "inner": {"dtype": torch.float64}},
        "table": {"a": 1},
    }
    assert init_arguments(Annotated, hparams) == {
        "config": Config(2, Inner(torch.float64)),
        "table": {"a": 1},
    }
