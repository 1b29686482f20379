"""What `echelon port` lists as departures are: a program for each gives different results with Echelon and Lightning.

What Lightning 2.6.6 gave stands here. With an interpreter that has both, Lightning's half is not skipped.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from typing import Any

import departing
import pytest
from beside import data, frameworks, net, trainer

import echelon
from echelon.common.other_trainers import OF_LIGHTNING_1
from echelon.lightning.departures import DEPARTURES, OLD_HOOKS, RENAMED_SETTINGS
from echelon.lightning.port import port_program

RECORDED: dict[str, dict[str, tuple[Any, Any]]] = {
    "a_checkpoint_with_an_object": {
        "object": ("taken", "CheckpointError"),
        "is a folder": (False, True),
        "torch.load": ("taken", "IsADirectoryError"),
        "storage_options": ("TypeError: `Trainer.save_checkpoint(...", "ConfigError: storage_options must be None"),
    },
    "a_run_with_the_default_logger": {
        "is there": (True, False),
    },
    "keys_of_a_checkpoint": {
        "loops": (True, False),
        "loop": (False, True),
        "data": (False, True),
        "pytorch-lightning_version": (True, False),
    },
    "the_last_checkpoint": {
        "is a link": (False, True),
        "enable_version_counter": ("taken", "TypeError: ModelCheckpoint.__init__() got an unexpected "),
        "file_exists": ("taken", "AttributeError: 'ModelCheckpoint' object has no attribute 'fi"),
    },
    "checkpoints_of_an_exception": {
        "ModelCheckpoint": (
            "ProcessRaisedException",
            "ConfigError: save_on_exception=True needs world_size=1",
        ),
        "OnExceptionCheckpoint": (
            "ProcessRaisedException",
            "ConfigError: OnExceptionCheckpoint needs world_size=1",
        ),
    },
    "a_logger_of_ones_own": {
        "calls": ([(0, "metrics", "step")], [(2,)]),
    },
    "an_mlflow_logger": {
        "without a tracking_uri": ("MlflowException", "taken"),
        "name": ("1", "digits"),
    },
    "a_plateau_and_a_checkpoint": {
        "steps": ([0, 1], [1, 2]),
    },
    "a_group_of_a_metric": {
        "fit": ("taken", "ModuleError: self.log('x'): sync_dist_group must be None"),
    },
    "a_timer_of_a_sanity_check": {
        "validated": (True, False),
    },
    "averaged_weights": {
        "initial_lr": (0.05, None),
        "lists": ("MisconfigurationException", "taken"),
    },
    "a_module_that_stays_in_training_mode": {
        "modes": ([("hook", True), ("step", True)], [("hook", False), ("step", False)]),
    },
    "a_step_that_draws_its_batches": {
        "fit": ("taken", "ModuleError: Net.training_step must take a batch"),
    },
    "more_epochs_than_the_most": {
        "settings": ("taken", "ConfigError: min_epochs=3 is above max_epochs=2; raise max"),
    },
    "accumulation_by_epoch": {
        "settings": ("taken", "ConfigError: accumulate_grad_batches must be an int"),
    },
    "settings_that_are_not_there": {
        "PL_TRAINER_MAX_EPOCHS": (7, 1000),
        "plugins": ("taken", "ConfigError: plugins must be None"),
        "suggest_integrations": (
            "TypeError: Trainer.__init__() got an unexpected keyword ",
            "ConfigError: Trainer has no argument 'suggest_integrations",
        ),
        "model_registry": ("taken", "ConfigError: model_registry must be None"),
    },
    "names_of_strategies_and_precisions": {
        "deepspeed": (
            "MisconfigurationException: To use the `DeepSpeedStrategy`",
            "ConfigError: Echelon does not have Lightning's strategy='d",
        ),
        "horovod": (
            "ValueError: You selected an invalid strategy name: `strat",
            "ConfigError: strategy='horovod' is not a known strategy. C",
        ),
        "transformer-engine": (
            "ModuleNotFoundError: Requirement 'transformer_engine>=0.11.0' not ",
            "ConfigError: precision='transformer-engine' is not a known",
        ),
    },
    "exports_of_a_module": {
        "to_tensorrt": ("ModuleNotFoundError", "AttributeError"),
    },
    "a_rate_for_two_groups": {
        "ratio": (1, 10),
    },
    "a_batch_size_that_is_found": {
        "steps": (2, 4),
    },
    "insides_of_a_trainer": {
        "fit_loop": ("taken", "AttributeError"),
        "val_check_batch": ("taken", "AttributeError"),
        "precision_plugin": ("taken", "AttributeError"),
        "checkpoint_io": ("taken", "AttributeError"),
    },
}
"""What Lightning gave, and what Echelon gives."""

NOT_IN_LIGHTNING_2_6 = {
    "storage_options",  # only a plugin takes it
    "suggest_integrations",  # a later version has it
    "horovod",  # earlier ones had it
    "deepspeed",
    "transformer-engine",  # need packages that are not installed
}
"""What Lightning 2.6.6, alone, refuses as well."""


@pytest.mark.parametrize("name", RECORDED)
def test_a_program_gives_what_is_recorded(name: str, framework: Any) -> None:
    place = 0 if hasattr(framework, "plugins") else 1
    assert getattr(departing, name)(framework) == {key: values[place] for key, values in RECORDED[name].items()}


def test_every_departure_is_shown_and_is_one() -> None:
    assert {row for rows in departing.SHOWS.values() for row in rows} == {one.row for one in DEPARTURES}
    assert RECORDED.keys() == departing.SHOWS.keys()
    alike = {key for program in RECORDED.values() for key, (theirs, ours) in program.items() if theirs == ours}
    assert alike <= NOT_IN_LIGHTNING_2_6
    taken = {key for program in RECORDED.values() for key, (_, ours) in program.items() if ours == "taken"}
    assert taken.isdisjoint(NOT_IN_LIGHTNING_2_6)


@pytest.mark.parametrize("name", RECORDED)
def test_port_notes_it_in_the_program_that_shows_it(name: str) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(departing, name)))
    said = " ".join(note.text for note in port_program(f"import lightning.pytorch as pl\n{source}").notes)
    assert [one.row for one in DEPARTURES if one.row in departing.SHOWS[name] and one.says not in said] == []


@pytest.mark.parametrize(("old", "new"), OLD_HOOKS.items())
def test_a_hook_of_lightning_1_is_never_called(old: str, new: str) -> None:
    own = frameworks()["echelon"]
    module = net(own, **{old: lambda self, *args: self.notes.append(old)})
    module.test_step = module.validation_step
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in ("fit", "test"):
            try:
                getattr(trainer(own, max_epochs=1), task)(module, data())
            except echelon.ModuleError as error:
                said.append(str(error))
    said += [str(one.message) for one in caught]
    assert module.notes == []
    assert any(f"Net.{old}" in one and new in one for one in said), said


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_an_argument_with_another_name_is_taken_under_it(old: str, new: str) -> None:
    name, argument = old.removesuffix(")").split("(")
    value = {"devices": 1, "strategy": "ddp", "default_root_dir": "there", "every_n_epochs": 2}.get(new, False)
    ported = port_program(f"import lightning.pytorch as pl\npl.{name}({argument}={value!r})\n")
    (call,) = (node for node in ast.walk(ast.parse(ported.source)) if isinstance(node, ast.Call))
    assert ([keyword.arg for keyword in call.keywords], ported.notes) == ([new], ())
    made = getattr(echelon, name)(**{new: value})
    assert str(getattr(getattr(made, "settings", made), new)) == str(value)
    with pytest.raises((echelon.ConfigError, TypeError), match=argument):
        getattr(echelon, name)(**{argument: value})


@pytest.mark.parametrize(("argument", "use"), OF_LIGHTNING_1.items())
def test_an_argument_of_lightning_1_is_refused_as_port_says(argument: str, use: str) -> None:
    with pytest.raises(echelon.ConfigError) as caught:
        echelon.Trainer(**{argument: 1})
    assert f"use {use}." in str(caught.value)
    if f"Trainer({argument})" not in RENAMED_SETTINGS:
        (note,) = port_program(f"import lightning.pytorch as pl\npl.Trainer({argument}=1)\n").notes
        assert note.text == f"Trainer({argument}=): use {use}"
