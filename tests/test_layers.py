"""Dependencies point down: every import of the package is walked, also those in functions and under TYPE_CHECKING."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Which floors the modules of a floor may import besides their own; the root and `testing` stand above all.
FLOORS = {"strategies": (), "callbacks": ("strategies",), "trainer": ("strategies", "callbacks")}

# From the top; a module imports from its own level and those below. Modules not named here form the lowest.
TRAINER_LEVELS = (
    ("cli",),
    ("render_command",),
    ("config",),
    ("trainer",),
    ("recovery", "rollback", "running"),
    ("assembly", "checks", "outcome", "request", "supervision", "view"),
    ("memory_writer",),
    ("snapshot",),
    ("loop",),
    ("lockstep", "step"),
    ("shared_step",),
    ("session",),
    ("loading",),
    ("dealing", "loaders", "sample_trail", "sampling", "streams"),
)


def source_files(root):
    """Map the dotted name below the root ("" is the root itself) of every module of the package to its file."""
    files = [*root.glob("*.py"), *(file for floor in FLOORS for file in root.glob(f"{floor}/**/*.py"))]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return {name.removesuffix("__init__").removesuffix("."): file for name, file in zip(names, files, strict=True)}


def imports_of(name, file, known):
    """Return the names of our modules that one imports, and those that it does not import relatively."""
    parts = name.split(".") if name else []
    package = parts if file.name == "__init__.py" else parts[:-1]
    found, absolute = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            absolute.update(alias.name for alias in node.names if alias.name.split(".")[0] == "echelon")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            absolute.update({node.module} if node.module.split(".")[0] == "echelon" else ())
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            submodules = {alias.name: ".".join([*base, alias.name]) for alias in node.names}
            found.update(module if module in known else ".".join(base) for module in submodules.values())
    return found, absolute


def floor_of(name):
    return name.split(".")[0]


def level_of(name):
    """Return the level of a module of the trainer, counted from the top."""
    part = name.split(".")[1] if "." in name else ""
    return next((level for level, names in enumerate(TRAINER_LEVELS) if part in names), len(TRAINER_LEVELS))


def violations(root):
    files = source_files(root)
    graph, wrong = {}, []
    for name, file in files.items():
        graph[name], absolute = imports_of(name, file, files)
        wrong += [f"{name} imports {other}, not relatively" for other in sorted(absolute)]
        for other in sorted(graph[name]):
            if floor_of(name) in FLOORS and floor_of(other) not in (floor_of(name), *FLOORS[floor_of(name)]):
                wrong.append(f"{name} imports {other or 'the root'}, of a higher floor")
            elif floor_of(name) == floor_of(other) == "trainer" and level_of(other) < level_of(name):
                wrong.append(f"{name} imports {other}, of a higher level")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"cycle of {', '.join(sorted(set(error.args[1])))}")
    return wrong


def test_every_import_points_down_and_none_closes_a_cycle():
    assert violations(ROOT) == []


def test_the_walk_sees_the_whole_package():
    files = source_files(ROOT)
    assert {"", "strategies", "callbacks", "trainer", "trainer.checkpoint", "trainer.loop"} <= set(files)
    assert "trainer.step" in imports_of("trainer.loop", files["trainer.loop"], files)[0]


def test_every_named_level_is_a_module():
    named = {f"trainer.{name}" for names in TRAINER_LEVELS for name in names}
    assert named - set(source_files(ROOT)) == set()


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("strategies/a.py", "from ..callbacks import b", "strategies.a imports callbacks.b, of a higher floor"),
        ("callbacks/a.py", "from .. import x", "callbacks.a imports the root, of a higher floor"),
        (
            "callbacks/a.py",
            "def f():\n    from ..trainer.loop import x",
            "callbacks.a imports trainer.loop, of a higher floor",
        ),
        (
            "trainer/a.py",
            "if TYPE_CHECKING:\n    from .loop import x",
            "trainer.a imports trainer.loop, of a higher level",
        ),
        ("trainer/deep/a.py", "from ..loop import x", "trainer.deep.a imports trainer.loop, of a higher level"),
        ("trainer/a.py", "from echelon.strategies import x", "trainer.a imports echelon.strategies, not relatively"),
        ("trainer/a.py", "import echelon", "trainer.a imports echelon, not relatively"),
        ("callbacks/a.py", "from .b import x", "cycle of callbacks.a, callbacks.b"),
        ("callbacks/a.py", "from . import b", "cycle of callbacks.a, callbacks.b"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line, found):
    write(tmp_path, {"__init__.py": "", "callbacks/b.py": "from .a import x", "trainer/loop.py": "", file: line})
    assert violations(tmp_path) == [found]


def test_right_imports_are_not(tmp_path):
    below = "from ..callbacks.b import x\nfrom .deep import y\nimport torch"
    write(tmp_path, {"callbacks/b.py": "from .a import x", "trainer/deep.py": "", "trainer/loop.py": below})
    assert violations(tmp_path) == []


def write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
