"""What editors show of a Trainer's arguments is what Settings has: names, order, types and defaults, each explained."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import echelon
from echelon import Trainer
from echelon.trainer.session import arguments, settings

SETTINGS = ast.parse(Path(settings.__file__).read_text())
ARGUMENTS = ast.parse(Path(arguments.__file__).read_text())


def class_of(tree, name):
    (found,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    return found


def fields():
    """Return the type and default of each setting as an argument has them: of those in `Defaulted`, None as well."""
    for line in class_of(SETTINGS, "Settings").body:
        if isinstance(line, ast.AnnAssign):
            kind, default = line.annotation, line.value
            if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Defaulted":
                kind, default = ast.BinOp(kind.slice, ast.BitOr(), ast.Constant(None)), default.args[0]
            yield line.target.id, (ast.unparse(kind), ast.unparse(default))


def written():
    (constructor,) = [
        line for line in class_of(ARGUMENTS, "TrainerArguments").body if getattr(line, "name", "") == "__init__"
    ]
    names = constructor.args.kwonlyargs
    assert [one.arg for one in constructor.args.args] == ["self"]
    for name, default in zip(names, constructor.args.kw_defaults, strict=True):
        yield name.arg, (ast.unparse(name.annotation), ast.unparse(default))


def test_the_signature_that_editors_read_is_that_of_the_settings():
    assert list(written()) == list(fields())


def test_each_argument_is_explained_once():
    text = inspect.getdoc(Trainer.__init__).split("Args:")[1].split("Raises:")[0]
    explained = re.findall(r"^    (\w+): .{5,}", text, re.MULTILINE)
    assert explained == [name for name, _ in fields()]
    texts = [line for line in class_of(SETTINGS, "Settings").body[1:] if isinstance(line, ast.Expr)]
    assert texts == [], "what a setting means is written in TrainerArguments alone"


def test_the_signature_at_run_time_has_the_same_names():
    assert list(inspect.signature(Trainer).parameters) == [name for name, _ in fields()]


def test_a_trainer_takes_what_the_signature_shows_and_nothing_else():
    trainer = Trainer(max_epochs=3, gradient_clip_algorithm=None, logger=False, plugins=None)
    assert trainer.max_epochs == 3
    with pytest.raises(echelon.ConfigError, match="precison.*Did you mean"):
        Trainer(precison="bf16-mixed")
    with pytest.raises(echelon.ConfigError, match="keyword arguments only"):
        Trainer(3)
