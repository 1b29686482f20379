"""Imports point down: every import of the package is walked, also those in functions and under TYPE_CHECKING."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom. A file imports from its own level and from those below; "callbacks" and the like are the files at the
# top of that folder which are not named themselves. The root, `__main__` and `testing` are above all others.
LEVELS = (
    ("common.internals",),
    ("common",),
    ("common.storage",),
    ("strategies.torch_internals",),
    ("strategies.devices",),
    ("strategies.cluster",),
    ("strategies.distributed",),
    ("strategies.targets", "strategies.wrapped"),
    ("strategies.launch", "strategies.state"),
    ("strategies.module", "strategies.snapshots", "strategies.units"),
    ("strategies.context_parallel", "strategies.pipeline", "strategies.pretrained", "strategies.tensor_parallel"),
    ("strategies.experts", "strategies.logits"),
    ("strategies.parallel", "strategies.resilience", "strategies.servers", "strategies.doctor"),
    ("strategies.placed",),
    ("strategies",),
    ("strategies.estimate",),
    ("callbacks.samples", "callbacks.goodput", "callbacks.figures"),
    ("callbacks.finders",),
    ("callbacks.callback", "callbacks.dispatch", "callbacks.run"),
    ("callbacks.helpers",),
    ("callbacks",),
    ("trainer.metrics", "trainer.loggers"),
    ("trainer.checkpoint",),
    ("trainer.module",),
    ("trainer.streams",),
    ("trainer.data",),
    ("trainer.sequences",),
    ("trainer.session",),
    ("trainer.loop",),
    ("trainer.resume", "trainer.steps"),
    ("trainer.planning", "trainer.engine", "trainer.tuning"),
    ("trainer.savings",),
    ("trainer",),
    ("trainer.verify", "lightning.tuning", "lightning.extras"),
    ("lightning",),
    ("lightning.own_loops", "lightning.command_line", "lightning.demos"),
    ("trainer.cli",),
)
LEVEL_OF = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
FLOORS = ("common", "strategies", "callbacks", "trainer", "lightning")
LARGEST_ROOM = 16
# It has one file for each callback.
LARGEST_FLOOR = {"callbacks": 35}


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


def room_of(name):
    """Return the room of a module, as `LEVELS` names it; a package's ``__init__`` belongs to its room."""
    parts = name.split(".")
    return next((room for room in (".".join(parts[:2]), parts[0]) if room in LEVEL_OF), "")


def level_of(name):
    return LEVEL_OF.get(room_of(name), len(LEVELS))


def cycle_of(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def violations(root):
    files = source_files(root)
    graph, rooms, wrong = {}, {}, []
    for name, file in sorted(files.items()):
        graph[name], absolute = imports_of(name, file, files)
        wrong += [f"{name} imports {other}, not relatively" for other in sorted(absolute)]
        for other in sorted(graph[name]):
            if name and level_of(other) > level_of(name):
                wrong.append(f"{name} imports {other or 'the root'}, of a higher level")
            if room_of(other) != room_of(name):
                rooms.setdefault(room_of(name), set()).add(room_of(other))
    for what, found in (("cycle", cycle_of(graph)), ("cycle of rooms", cycle_of(rooms))):
        wrong += [f"{what}: {', '.join(found)}"] if found else []
    return wrong


def test_every_import_points_down_and_none_closes_a_cycle():
    assert violations(ROOT) == []


def test_the_walk_sees_the_whole_package():
    files = source_files(ROOT)
    assert {"", "strategies", "callbacks", "trainer", "trainer.checkpoint", "trainer.loop.train"} <= set(files)
    assert "trainer.loop.step" in imports_of("trainer.loop.train", files["trainer.loop.train"], files)[0]


def test_every_level_names_what_is_there_and_every_folder_has_a_level():
    files = set(source_files(ROOT))
    assert set(LEVEL_OF) - files == set()
    folders = {file.parent.relative_to(ROOT) for floor in FLOORS for file in ROOT.glob(f"{floor}/*/*.py")}
    assert {".".join(folder.parts) for folder in folders} - set(LEVEL_OF) == set()


def test_no_folder_is_crowded():
    files = [file.relative_to(ROOT) for floor in FLOORS for file in ROOT.glob(f"{floor}/**/*.py")]
    sizes = Counter(str(file.parent) for file in files if file.name != "__init__.py")
    assert {path: n for path, n in sizes.items() if n > LARGEST_FLOOR.get(path, LARGEST_ROOM)} == {}


def test_every_room_says_what_it_is_and_what_it_may_import():
    rooms = [file for floor in FLOORS for file in ROOT.glob(f"{floor}/*/**/__init__.py")]
    firsts = {str(file.relative_to(ROOT)): file.read_text().splitlines()[0] for file in rooms}
    assert {path: line for path, line in firsts.items() if "Imports" not in line} == {}


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("strategies/a.py", "from ..callbacks import b", "strategies.a imports callbacks.b, of a higher level"),
        ("callbacks/a.py", "from .. import x", "callbacks.a imports the root, of a higher level"),
        (
            "callbacks/a.py",
            "def f():\n    from ..trainer.loop import x",
            "callbacks.a imports trainer.loop, of a higher level",
        ),
        (
            "trainer/data/a.py",
            "if TYPE_CHECKING:\n    from ..loop import x",
            "trainer.data.a imports trainer.loop, of a higher level",
        ),
        (
            "trainer/data/deep/a.py",
            "from ...loop import x",
            "trainer.data.deep.a imports trainer.loop, of a higher level",
        ),
        ("trainer/a.py", "from echelon.strategies import x", "trainer.a imports echelon.strategies, not relatively"),
        ("trainer/a.py", "import echelon", "trainer.a imports echelon, not relatively"),
        ("callbacks/a.py", "from .b import x", "cycle: callbacks.a, callbacks.b"),
        ("callbacks/a.py", "from . import b", "cycle: callbacks.a, callbacks.b"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line, found):
    write(tmp_path, {"__init__.py": "", "callbacks/b.py": "from .a import x", "trainer/loop.py": "", file: line})
    assert violations(tmp_path) == [found]


def test_two_rooms_of_one_level_that_import_each_other_are_found(tmp_path):
    launch, state = "from ..state.b import x", "from ..launch.c import x"
    write(tmp_path, {"strategies/launch/a.py": launch, "strategies/launch/c.py": "", "strategies/state/b.py": ""})
    assert violations(tmp_path) == []
    write(tmp_path, {"strategies/state/d.py": state})
    assert violations(tmp_path) == ["cycle of rooms: strategies.launch, strategies.state"]


def test_right_imports_are_not(tmp_path):
    below = "from ..callbacks.b import x\nfrom .deep import y\nimport torch"
    write(tmp_path, {"callbacks/b.py": "from .a import x", "trainer/deep.py": "", "trainer/c.py": below})
    assert violations(tmp_path) == []


def write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_names_of_test_files_are_unique():
    # pytest imports them by their names alone
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
