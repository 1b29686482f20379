"""The rules of our code that a program can check; each takes sources and returns where it is broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
FLOORS = ("common", "strategies", "callbacks", "trainer", "lightning")
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match)


@dataclass(frozen=True)
class Source:
    """A file of the package: its path below the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS))

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{node.lineno}"  # type: ignore[attr-defined]


def package_sources(root: Path) -> list[Source]:
    """Return every file of the package whose root folder is given."""
    files = [
        *root.glob("*.py"),
        *(file for floor in FLOORS for file in root.glob(f"{floor}/**/*.py")),
    ]
    return [Source(str(file.relative_to(root)), file.read_text()) for file in sorted(files)]


# --- size and shape ---


def long_files(sources: Iterable[Source], most: int = 400) -> list[str]:
    """The examples in docstrings are not counted."""
    example = re.compile(r"^( *)Example::\n(?:(?:\1 .*)?\n)+", re.MULTILINE)
    lengths = {source.path: len(example.sub("", source.text).splitlines()) for source in sources}
    return [f"{path} has {length} lines" for path, length in lengths.items() if length > most]


def long_functions(sources: Iterable[Source], most: int = 70) -> list[str]:
    """A docstring is not counted, nor are decorators."""
    found = []
    for source in sources:
        for function in source.functions:
            docstring = function.body[0] if ast.get_docstring(function) is not None else None
            length = function.end_lineno - function.lineno + 1
            length -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            if length > most:
                found.append(f"{source.at(function)} {function.name} has {length} lines")
    return found


def deep_nesting(sources: Iterable[Source], most: int = 3) -> list[str]:
    found = []
    for source in sources:
        for function in source.functions:
            depth = max(map(_depth, function.body))
            if depth > most:
                found.append(f"{source.at(function)} {function.name} nests {depth} blocks")
    return found


def _depth(node: ast.stmt) -> int:
    """How deeply branches and loops are nested; an ``elif`` is on the level of its ``if``.

    An inner function counts on its own, and a guard (``with``, ``try``) adds nothing.
    """
    if isinstance(node, DEFINITIONS):
        return 0
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + max(map(_depth, node.body)), _depth(node.orelse[0]))
    parts = list(ast.iter_child_nodes(node))
    inside = [child for child in parts if isinstance(child, ast.stmt)]
    inside += [child for part in parts if isinstance(part, ast.ExceptHandler | ast.match_case) for child in part.body]
    return isinstance(node, BRANCHES) + max(map(_depth, inside), default=0)


def many_parameters(sources: Iterable[Source], most: int = 6) -> list[str]:
    """Only parameters that may be given by position count, and not ``self``."""
    found = []
    for source in sources:
        for function in source.functions:
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            number = len(names) - (names[:1] in (["self"], ["cls"]))
            if number > most:
                found.append(f"{source.at(function)} {function.name} takes {number} positional parameters")
    return found


def deep_classes(sources: Sequence[Source], most: int = 2) -> list[str]:
    """How many levels a class is below its highest ancestor in our package."""
    bases = {one.name: base_names(one) for source in sources for one in source.classes}

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases[name] if base in bases), default=0)

    return [f"{name} is {depth(name)} steps below its ancestors" for name in bases if depth(name) > most]


def base_names(one: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without the modules and the type arguments that they are written with."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in one.bases]
    return [ast.unparse(base).rpartition(".")[2] for base in plain]


# --- what it says ---


def riddle_openings(sources: Iterable[Source]) -> list[str]:
    """A module docstring opens with the thing that the module holds, not with a question word."""
    word = re.compile(r"(What|How|Which|Where|When|Whether|Who|Whom|Whose|Why)\b", re.IGNORECASE)
    openings = ((source.path, (ast.get_docstring(source.tree) or "").partition("\n")[0]) for source in sources)
    return [f"{path} opens with {line!r}" for path, line in openings if word.match(line)]


def repeated_class_names(sources: Iterable[Source]) -> list[str]:
    """Every class of the package has a unique name, including private and inner ones."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for one in source.classes:
            places.setdefault(one.name, []).append(source.at(one))
    return [f"class {name} stands at {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def unsaid_files(sources: Iterable[Source]) -> list[str]:
    """The first line of a file is a docstring that says in one sentence what its idea is."""
    first = re.compile(r'"""[A-Z`].*[^.]\.("""|$)')
    return [
        f"{source.path} begins with {line!r}"
        for source in sources
        if not first.match(line := source.text.split("\n")[0])
    ]


def undocumented(sources: Sequence[Source]) -> list[str]:
    """Public names without docstring.

    A method needs none that an ancestor, a Protocol it satisfies, or the class named by `documented_by` documents.
    """
    classes = {one.name: one for source in sources for one in source.classes}
    protocols = [name for name, one in classes.items() if "Protocol" in base_names(one)]

    def documents(name: str, method: str) -> bool:
        if name not in classes:
            return False
        if any(item.name == method and ast.get_docstring(item) for item in _methods(classes[name])):
            return True
        asked = [one for one in protocols if one != name and method in names(classes[one])]
        satisfied = [one for one in asked if names(classes[one]) <= names(classes[name])]
        return any(documents(base, method) for base in (*_documenting(classes[name]), *satisfied))

    def names(one: ast.ClassDef) -> set[str]:
        inherited = (names(classes[base]) for base in base_names(one) if base in classes)
        return {item.name for item in _methods(one)}.union(*inherited)

    found = []
    for source in sources:
        for owner, item in _public(source.tree, ""):
            inherited = isinstance(item, FUNCTIONS) and owner and documents(owner, item.name)
            if ast.get_docstring(item) is None and not inherited:
                found.append(f"{source.at(item)} {owner + '.' if owner else ''}{item.name} has no docstring")
    return found


def _documenting(one: ast.ClassDef) -> list[str]:
    """Return the names of the classes from which a class's methods take their docstrings: bases, ``documented_by``."""
    calls = [decorator for decorator in one.decorator_list if isinstance(decorator, ast.Call)]
    return base_names(one) + [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "documented_by"]


def _methods(one: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in one.body if isinstance(item, FUNCTIONS)]


def _public(parent: ast.Module | ast.ClassDef, owner: str) -> Iterator[tuple[str, ast.stmt]]:
    for item in parent.body:
        if not isinstance(item, DEFINITIONS) or item.name.startswith("_"):
            continue
        accessors = [ast.unparse(decorator) for decorator in item.decorator_list]
        if any(one.endswith((".setter", ".deleter", "overload")) for one in accessors):
            continue
        yield owner, item
        if isinstance(item, ast.ClassDef):
            yield from _public(item, item.name)


def reminders(sources: Iterable[Source]) -> list[str]:
    word = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|HAC[K])\b")
    lines = (
        (source.path, number, line) for source in sources for number, line in enumerate(source.text.splitlines(), 1)
    )
    return [f"{path}:{number} {line.strip()}" for path, number, line in lines if word.search(line)]


# --- what it does ---


def strategies_asked_their_class(sources: Iterable[Source]) -> list[str]:
    """`isinstance` with a concrete strategy, `hasattr`, `getattr`, `type` and comparisons of a strategy or its name.

    ``isinstance(x, Strategy)`` is allowed: it tells a strategy from a string.
    """
    return [
        f"{source.at(node)} {ast.unparse(node)}"
        for source in sources
        if not source.path.startswith("strategies/")
        for node in ast.walk(source.tree)
        if _asks_class(node)
    ]


def _asks_class(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id in ("isinstance", "issubclass"):
            asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            asked |= {name.attr for name in ast.walk(node.args[1]) if isinstance(name, ast.Attribute)}
            return any(name.endswith("Strategy") and name != "Strategy" for name in asked)
        return node.func.id in ("hasattr", "getattr", "type", "vars") and _is_strategy(node.args[0])
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return _is_strategy(node.value)
    if isinstance(node, ast.Compare):
        compared = [node.left, *node.comparators]
        text = any(isinstance(one, ast.Constant | ast.Tuple | ast.List | ast.Set) and _texts(one) for one in compared)
        return text and any(
            _is_strategy(one) or (isinstance(one, ast.Attribute) and _is_strategy(one.value)) for one in compared
        )
    return isinstance(node, ast.Match) and _is_strategy(node.subject)


def _is_strategy(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "strategy"


def pickles(sources: Iterable[Source]) -> list[str]:
    """Imports of what unpickles, and `torch.save` and `torch.load` but for ``weights_only=True``."""
    modules = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    functions = {"torch.load", "torch.save"}
    return [
        f"{source.at(node)} {ast.unparse(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if any(name.split(".")[0] in modules or name in functions for name in _imported(node))
        or (isinstance(node, ast.Call) and _unpickles(node))
    ]


def _unpickles(call: ast.Call) -> bool:
    said = {keyword.arg: keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)}
    if said.get("allow_pickle"):
        return True
    name = ast.unparse(call.func)
    return name == "torch.save" or (name == "torch.load" and said.get("weights_only") is not True)


def mocks(sources: Iterable[Source]) -> list[str]:
    """Imports of mocks."""
    return [
        f"{source.at(node)} {ast.unparse(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if any("mock" in name.split(".") for name in _imported(node))
    ]


def _imported(node: ast.AST) -> list[str]:
    """Return the names that a statement imports from elsewhere, each as module and as name of a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def readers_of_the_environment(sources: Iterable[Source]) -> list[str]:
    """Environment variables are read in one file."""
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|from os import .*\b(environ|getenv)\b")
    return [
        source.path
        for source in sources
        if source.path != "strategies/cluster/environment.py" and reads.search(source.text)
    ]


PRIVATE_NAMES = ("common/internals/", "strategies/torch_internals/")
"""The rooms of names that others keep private."""
_ACCEPTED = re.compile(r"#.*\bnoqa:[ ,A-Z0-9]*\bSLF001\b")
_PRIVATE = re.compile(r"_(?!_)\w*[a-z]\w*")


def private_names(sources: Iterable[Source]) -> list[str]:
    """Names that others keep private are used in two rooms: ruff is told to accept them (SLF001) in no other.

    Nor does another file import a private name or module, nor reach one past ruff: by its text, or as ``torch._x_``.
    """
    found = []
    for source in sources:
        if not source.path.startswith(PRIVATE_NAMES):
            lines = enumerate(source.text.splitlines(), 1)
            found += [f"{source.path}:{number} {line.strip()}" for number, line in lines if _ACCEPTED.search(line)]
            nodes = (node for node in ast.walk(source.tree) if _imports_private(node) or _hides_private(node))
            found += [f"{source.at(node)} {ast.unparse(node)}" for node in nodes]
    return found


def _imports_private(node: ast.AST) -> bool:
    parts = [name.split(".") for name in _imported(node) if name != "__future__.annotations"]
    return any(one.startswith("_") for first, *rest in parts for one in rest)


def _hides_private(node: ast.AST) -> bool:
    """Return whether code reads a private name of torch itself, or one as text, such as ``getattr(x, "_name")``."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        return (owner == "torch" or owner.startswith("torch.")) and bool(_PRIVATE.fullmatch(node.attr))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
        return False
    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    if node.func.id not in ("getattr", "hasattr", "setattr") or not isinstance(name, str):
        return False
    # every named tuple has these fields, and what ends with an underscore as well is a protocol, as IPython's are
    return name != "_fields" and not name.endswith("_") and bool(_PRIVATE.fullmatch(name))


# --- errors ---

VERBS = (
    "add|ask|assign|attach|begin|build|call|change|check|choose|compute|configure|convert|copy|correct|create|decorate|define"
    "|delete|derive|divide|do not|drop|free|give|import|install|keep|leave|let|load|log|look|lower|make|move|name|omit"
    "|override|pass|pick|pip install|put|quote|raise|read|remove|rename|repair|replace|resume|return|run|save|see|seed"
    "|set|start|store|switch|take|turn|unset|use|wait|wrap|write"
)
# An imperative at the beginning of a clause; or the functions that say what was probably meant.
REMEDY = re.compile(rf"(?:^|[;:.,(] |\b(?:or|and|then|but|please) )(?:{VERBS})\b|must be|did_you_mean", re.IGNORECASE)
VALUE = re.compile(r"\b\w+=\S|\bfound \S")


def errors_without_value_or_remedy(sources: Sequence[Source], exceptions: Iterable[str]) -> list[str]:
    """An error of ours shows what was found, in a placeholder, and says what to do."""
    helpers = {function.name: function for source in sources for function in source.functions}
    found = {}
    for source in sources:
        for function in source.functions:
            for raised in _raised(function, set(exceptions)):
                shown, said = _message(raised, function, source.tree, helpers)
                there = {"value": shown or VALUE.search(said), "remedy": REMEDY.search(said)}
                found[source.at(raised)] = [what for what in there if not there[what]], said.strip()
    return [f"{place} lacks a {' and a '.join(lacks)}: {said}" for place, (lacks, said) in found.items() if lacks]


def _raised(function: ast.AST, exceptions: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and ast.unparse(node.exc.func).rpartition(".")[2] in exceptions
        ):
            yield node.exc


def _message(
    raised: ast.Call, function: ast.AST, module: ast.Module, helpers: Mapping[str, ast.AST]
) -> tuple[bool, str]:
    """Return whether a message holds a placeholder, and its texts: also of names in it, and of functions it calls."""
    names = {node.id for node in ast.walk(raised) if isinstance(node, ast.Name)}
    parts: list[ast.AST] = [raised]
    for node in (*ast.walk(function), *module.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            parts += [node.value for target in targets if isinstance(target, ast.Name) and target.id in names]
    calls = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    parts += [helpers[name] for name in sorted(called) if name in helpers]
    has_placeholder = any(isinstance(node, ast.FormattedValue) for part in parts for node in ast.walk(part))
    return has_placeholder, "; ".join((*(" ".join(_texts(part)) for part in parts), *sorted(called)))


def _texts(*parts: ast.AST) -> list[str]:
    nodes = [node for part in parts for node in ast.walk(part)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
