"""The scorecard of our code holds, and each of its checks can fail."""

import re
import traceback
from pathlib import Path

import pytest
import scorecard
import torch
from scorecard import Source
from torch import nn

from echelon import Trainer, TrainModule
from echelon.common import errors

ROOT = Path(__file__).parents[1]
PACKAGE = scorecard.package_sources(ROOT)
EXCEPTIONS = [name for name, value in vars(errors).items() if isinstance(value, type)]

# Lightning's hooks have the parameters that Lightning gives them; where a rule would make code worse, it is named here.
ALLOWED = {
    # the interface of all strategies, which is read in one go, in the order of a run
    scorecard.long_files: (r"^strategies/strategy.py has 4[0-5]\d lines$",),
    scorecard.many_parameters: ("write_on_batch_end",),
    # between processes of one run, nothing of it being on disk afterwards; and what torch is kept from unpickling
    scorecard.pickles: (
        "strategies/distributed/pickling.py",
        "strategies/torch_internals/rendezvous.py",
        "trainer/checkpoint/single_file.py",  # it writes the member that torch.load reads, and unpickles nothing
        "lightning/checkpoint_files.py",  # in memory, of what a checkpoint holds, for a library that calls torch.load
    ),
    # what Lightning's users derive from: classes like those of a program, below the bases that programs have
    # and one step of a strategy holds Lightning's names alone
    scorecard.deep_classes: (
        r"Strategy is 3 steps",
        "^(ManualOptim)?Boring(Model|DataModule) ",
        "^(Demo|MNIST|Lightning)[DMT]",
        "^(KeptProgressBar|ExponentialAverageShown) ",
    ),
    # it hands on the caller's variables as they are
    scorecard.readers_of_the_environment: ("strategies/launch/worker.py",),
    # what is wrong with one file: they are gathered into one message, which says what to do
    scorecard.errors_without_value_or_remedy: (
        r"checkpoint/finding.py:\d+ .*: ; CheckpointError$",
        r"checkpoint/loading.py:\d+ .* (is not in the manifest|is missing|has   bytes, not)",
        r"(?s)checkpoint/saving_by_ranks.py:\d+ lacks a value: .*; wait_for$",  # the error of another rank
    ),
}


def raising(message):
    return f"def f(x):\n    raise ConfigError({message})"


CHECKS_AND_WHAT_THEY_FIND = [
    (scorecard.long_files, "x = 1\n" * 401),
    (scorecard.long_functions, "def f():\n" + "    x = 1\n" * 70),
    (
        scorecard.long_functions,
        'class A:\n    async def f(self):\n        """One.\n        """\n' + "        x = 1\n" * 70,
    ),
    (
        scorecard.deep_nesting,
        "def f():\n if a:\n  for b in c:\n   try: pass\n   except E:\n    if d:\n     while e: pass",
    ),
    (scorecard.deep_nesting, "def f():\n if a: pass\n elif b:\n  while c:\n   match d:\n    case 1:\n     if e: pass"),
    (scorecard.many_parameters, "def f(a, b, c, /, d, e, f, g): ..."),
    (scorecard.many_parameters, "class A:\n    def f(self, a, b, c, d, e, f, g=1, *, h): ..."),
    (scorecard.deep_classes, "class A: ...\nclass B(A): ...\nclass C(m.B[int], nn.Module): ...\nclass D(C): ..."),
    (scorecard.unsaid_files, "import torch"),
    (scorecard.unsaid_files, '"""No full stop"""'),
    (scorecard.unsaid_files, '"""A sentence that goes on\nin the next line."""'),
    (scorecard.riddle_openings, '"""What a rank sends, and how."""'),
    (scorecard.riddle_openings, '"""Where files are kept."""\nimport torch'),
    (scorecard.repeated_class_names, "class A: ...\nclass B:\n    class A: ..."),
    (scorecard.repeated_class_names, "class _A: ...\ndef f():\n    class _A: ..."),
    (scorecard.undocumented, "def f(): ..."),
    (scorecard.undocumented, "class A: ..."),
    (scorecard.undocumented, 'class A:\n    """One."""\n    @property\n    def f(self): ...'),
    (
        scorecard.undocumented,
        'class A:\n    """One."""\n    def f(self): ...\nclass B(A):\n    """Two."""\n    def f(self): "."',
    ),
    (
        scorecard.undocumented,
        'class A:\n    """."""\n    def f(self): "."\n@documented_by(A)\nclass B:\n    """."""\n    def g(self): ...',
    ),
    (scorecard.reminders, "x = 1  # TO" + "DO: later"),
    (scorecard.strategies_asked_their_class, "isinstance(self.strategy, DDPStrategy)"),
    (scorecard.strategies_asked_their_class, "isinstance(x, (Strategy, ddp.DDPStrategy))"),
    (scorecard.strategies_asked_their_class, "hasattr(trainer.strategy, 'shard')"),
    (scorecard.strategies_asked_their_class, "type(strategy) is X"),
    (scorecard.strategies_asked_their_class, "strategy.__class__"),
    (scorecard.strategies_asked_their_class, "if strategy.name in ('ddp', 'fsdp'): ..."),
    (scorecard.strategies_asked_their_class, "if settings.strategy == 'ddp': ..."),
    (scorecard.strategies_asked_their_class, "match self._strategy:\n    case DDPStrategy(): ..."),
    (scorecard.pickles, "import pickle"),
    (scorecard.pickles, "def f():\n    from torch import load"),
    (scorecard.pickles, "torch.load(path)"),
    (scorecard.pickles, "torch.load(path, weights_only=safe)"),
    (scorecard.pickles, "torch.save(x, path)"),
    (scorecard.pickles, "numpy.load(path, allow_pickle=True)"),
    (scorecard.mocks, "from unittest" + ".mock import patch"),
    (scorecard.mocks, "from unittest import mock"),
    (scorecard.mocks, "import mock"),
    (scorecard.readers_of_the_environment, "os.environ['RANK']"),
    (scorecard.readers_of_the_environment, "from os import path, getenv"),
    (scorecard.private_names, "x = tensor._version  # noqa: SLF001"),
    (scorecard.private_names, "# ruff: noqa: SLF001 - there is no other name"),
    (scorecard.private_names, "x.y._z = 1  # type: ignore[attr-defined]  # noqa: E501, SLF001 - no other"),
    (scorecard.private_names, "def f():\n    from torch.utils._pytree import tree_map"),
    (scorecard.private_names, "from torch.nn.modules.dropout import _DropoutNd"),
    (scorecard.private_names, "import torch._dynamo"),
    (scorecard.private_names, "def f():\n    from numpy._core import x"),
    (scorecard.private_names, "x = getattr(model, '_orig_mod', None)"),
    (scorecard.private_names, "torch._foreach_mul_(tensors, 2)"),
    (scorecard.private_names, "before = torch.nn.init._no_grad_trunc_normal_"),
    (scorecard.errors_without_value_or_remedy, raising("f'{x} is wrong.'")),
    (scorecard.errors_without_value_or_remedy, raising("f'{x} cannot be read.'")),
    (scorecard.errors_without_value_or_remedy, raising("'The number is wrong; give another one.'")),
    (scorecard.errors_without_value_or_remedy, raising("")),
    (scorecard.errors_without_value_or_remedy, raising("_say(x)") + "\ndef _say(x):\n    return f'{x} is wrong.'"),
]

CHECKS_AND_WHAT_THEY_PASS = [
    (scorecard.long_functions, 'def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * 69),
    (scorecard.deep_nesting, "def f():\n if a:\n  for b in c:\n   if d: pass\n   elif e: pass\n   elif f: pass"),
    (scorecard.deep_nesting, "def f():\n with a:\n  try:\n   for b in c:\n    if d:\n     if e: pass\n  finally: pass"),
    (scorecard.many_parameters, "class A:\n    def f(self, a, b, c, d, e, f, *, g, h): ..."),
    (scorecard.deep_classes, "class A: ...\nclass B(A): ...\nclass C(B, nn.Module): ..."),
    (scorecard.unsaid_files, '"""What it is: one idea."""'),
    (scorecard.riddle_openings, '"""Whatever: a sentence."""\ndef f():\n    """What it does."""'),
    (scorecard.riddle_openings, "import torch"),
    (scorecard.repeated_class_names, "class A: ...\nclass _A: ...\nclass B(A): ..."),
    (
        scorecard.undocumented,
        'class A:\n    """One."""\n    def f(self): "."\nclass B(A):\n    """Two."""\n    def f(self): ...',
    ),
    (
        scorecard.undocumented,
        'class A(Protocol):\n    """One."""\n    def f(self): "."\nclass B:\n    """."""\n    def f(self): ...',
    ),
    (
        scorecard.undocumented,
        'class A:\n    """."""\n    def f(self): "."\n@documented_by(A)\nclass B:\n    """."""\n    def f(self): ...',
    ),
    (
        scorecard.undocumented,
        (
            'class A(Protocol):\n    """."""\n    def f(self): "."\n    def g(self): "."\n'
            'class B:\n    """."""\n    def f(self): "."\nclass C(B):\n    """."""\n    def g(self): ...'
        ),
    ),
    (scorecard.undocumented, "class _A:\n    def f(self): ...\ndef _g(): ..."),
    (scorecard.strategies_asked_their_class, "isinstance(strategy, Strategy) and strategy.shards_parameters"),
    (scorecard.strategies_asked_their_class, "strategy is None or annealing_strategy == 'cos'"),
    (scorecard.pickles, "torch.load(path, map_location='cpu', weights_only=True)"),
    (scorecard.private_names, "x = 'noqa: SLF001'\ny = version_of(z)  # noqa: S301"),
    (scorecard.private_names, "from __future__ import annotations\nfrom ._own import x\nfrom torch.utils import data"),
    (
        scorecard.private_names,
        "hasattr(x, '_fields')\nhasattr(x, '_repr_html_')\nx.__doc__\ntorch.__version__",
    ),
    (scorecard.errors_without_value_or_remedy, raising("f'x={x!r} is wrong; give a positive number.'")),
    (scorecard.errors_without_value_or_remedy, raising("f'x={x!r} is unknown.{did_you_mean(x, known)}'")),
    (scorecard.errors_without_value_or_remedy, raising("'x=None, but the run needs one. Set it.'")),
    (scorecard.errors_without_value_or_remedy, "GO = 'use 1'\n" + raising("f'{x} is wrong; {GO}.'")),
    (scorecard.errors_without_value_or_remedy, raising("_say(x)") + "\ndef _say(x):\n    return f'{x}: use 1.'"),
    (scorecard.errors_without_value_or_remedy, "raise StopIteration"),
]

# What is said of tests, too.
OF_TESTS = [scorecard.mocks, scorecard.reminders]
ALL_CHECKS = list(dict.fromkeys(check for check, _ in CHECKS_AND_WHAT_THEY_FIND))


def run(check, sources):
    return check(sources, EXCEPTIONS) if check is scorecard.errors_without_value_or_remedy else check(sources)


def named(check):
    return check.__name__ if callable(check) else ""


@pytest.mark.parametrize("check", ALL_CHECKS, ids=named)
def test_the_package_has_no(check):
    found = run(check, PACKAGE)
    assert [line for line in found if not any(re.search(one, line) for one in ALLOWED.get(check, ()))] == []


@pytest.mark.parametrize("check", OF_TESTS, ids=named)
def test_the_tests_have_no(check):
    files = [file for folder in ("tests", "examples", "benchmarks") for file in ROOT.glob(f"{folder}/**/*.py")]
    assert run(check, [Source(str(file.relative_to(ROOT)), file.read_text()) for file in files]) == []


@pytest.mark.parametrize(("check", "text"), CHECKS_AND_WHAT_THEY_FIND, ids=named)
def test_what_breaks_the_rule_is_found(check, text):
    assert len(run(check, [Source("trainer/a.py", text)])) == 1


@pytest.mark.parametrize(("check", "text"), CHECKS_AND_WHAT_THEY_PASS, ids=named)
def test_what_follows_the_rule_is_not(check, text):
    assert run(check, [Source("trainer/a.py", text)]) == []


def test_every_file_of_the_package_is_read():
    paths = {source.path for source in PACKAGE}
    assert {"__init__.py", "strategies/strategy.py", "callbacks/run.py", "trainer/checkpoint/files.py"} <= paths
    assert {"ConfigError", "EchelonError"} <= set(EXCEPTIONS)


def test_strategies_may_ask_what_they_are():
    assert run(scorecard.strategies_asked_their_class, [Source("strategies/a.py", "type(strategy)")]) == []


class Stacked(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.stacks = []

    def training_step(self, batch):
        self.stacks.append([frame.name for frame in traceback.extract_stack()])
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_at_most_six_frames_lie_between_fit_and_the_step_of_the_user(tmp_path):
    module = Stacked()
    Trainer(max_steps=2, default_root_dir=tmp_path, enable_progress_bar=False).fit(module, torch.ones(2, 1, 1))
    for stack in module.stacks:
        below = stack[len(stack) - stack[::-1].index("fit") :]
        assert below[-1] == "training_step"
        assert len(below) <= 6, below
        assert stack[stack.index("fit") - 1] == "test_at_most_six_frames_lie_between_fit_and_the_step_of_the_user"
