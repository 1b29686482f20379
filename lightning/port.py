"""Port of a Lightning program: its imports and names rewritten, and a note on each line that behaves differently.

The program is parsed into a syntax tree, and only the names are replaced in its text: comments and layout stay as they
are.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from typing import Final, Literal

from ..common.errors import ConfigError
from ..common.other_trainers import OF_LIGHTNING_1
from .departures import DEPARTURES, OLD_HOOKS, RENAMED_SETTINGS, Departure
from .imports import ELSEWHERE, Bound, is_lightning, new_name, rewrite_from, rewrite_import
from .names import PUBLIC_AT_ROOT, WITHOUT_COUNTERPART, find_replacement, has_counterpart, is_known
from .stand_in import MODULES

Kind = Literal["departs", "no counterpart"]


_PATTERNS_OF_METHODS: Final = [(one, pattern) for one in DEPARTURES for pattern in one.methods]


@dataclass(frozen=True, order=True)
class Note:
    """A note for the user about a line."""

    line: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class Ported:
    """A ported program."""

    source: str
    notes: tuple[Note, ...]
    num_changes: int


def port_program(source: str, name: str = "the program") -> Ported:
    """Return a Lightning program with Echelon's imports and names, and notes on the differences.

    Args:
        source: the text of a Python file.
        name: the name of the program in errors.

    Raises:
        ConfigError: if it is not valid Python, or does not import Lightning.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{name} must be Python of this version, found {error.args[0]!r} in line {line}; correct it first."
        ) from None
    porter = _Porter(source)
    porter.visit_imports(tree)
    if not porter.bound and not porter.has_lightning:
        raise ConfigError(
            f"{name} must import lightning or pytorch_lightning, found no such import; give the files that do."
        )
    porter.visit(tree)
    return Ported(porter.edited(), tuple(sorted(set(porter.notes))), len(porter.edits))


@dataclass
class _Porter(ast.NodeVisitor):
    source: str
    bound: dict[str, Bound] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    edits: dict[tuple[int, int], str] = field(default_factory=dict)
    """New texts by the range of bytes that they replace."""
    has_lightning: bool = False

    def __post_init__(self) -> None:
        self._bytes = self.source.encode()
        lines = self._bytes.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._needs_elsewhere = False
        self._first_import: ast.stmt | None = None

    # --- imports ---

    def visit_imports(self, tree: ast.AST) -> None:
        """Replace the imports, and remember what they bind."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(is_lightning(alias.name) for alias in node.names):
                self.has_lightning = True
                self._edit(node, rewrite_import(node).text)
                self.bound.update(rewrite_import(node).bound)
                self._first_import = self._first_import or node
            elif isinstance(node, ast.ImportFrom) and not node.level and is_lightning(node.module):
                self._visit_from(node)

    def _visit_from(self, node: ast.ImportFrom) -> None:
        self.has_lightning = True
        rewritten = rewrite_from(node, " " * node.col_offset)
        if rewritten.source is None:
            self._edit(node, rewritten.text)
        elif not rewritten.unknown:
            self._exchange_in_place(node, rewritten.source)
        self.bound.update(rewritten.bound)
        for name in rewritten.unknown:
            self._note(
                node, "no counterpart", f"{name}: Echelon has nothing like it; this import still needs Lightning"
            )
        for one in rewritten.bound.values():
            if not one.is_module:
                self._note_name(node, one.name)

    def _exchange_in_place(self, node: ast.ImportFrom, source: str) -> None:
        """Replace only the module and the names, so that parentheses and comments stay."""
        assert node.module is not None
        start = self._bytes.index(node.module.encode(), self._range(node)[0])
        self.edits[start, start + len(node.module.encode())] = source
        for alias in node.names:
            if source != ELSEWHERE and new_name(alias.name) != alias.name:
                start = self._offset(alias.lineno, alias.col_offset)
                self.edits[start, start + len(alias.name.encode())] = new_name(alias.name)

    def _note_name(self, node: ast.AST, name: str) -> None:
        if not has_counterpart(name):
            self._note(node, "no counterpart", f"{name}: use {WITHOUT_COUNTERPART[name]}")

    # --- names ---

    def visit_Name(self, node: ast.Name) -> None:
        """Replace a name that an import has bound to a class with a new name."""
        one = self.bound.get(node.id)
        if one is not None and not one.is_module and node.id == one.name and has_counterpart(one.name):
            self._replace_name(node, one.name)
        elif one is not None and one.is_module and node.id in ("lightning", "pytorch_lightning"):
            self._edit(node, "echelon")

    def _replace_name(self, node: ast.Name, name: str) -> None:
        if new_name(name) != name and name in PUBLIC_AT_ROOT:
            self._edit(node, new_name(name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Replace ``pl.callbacks.EarlyStopping`` with ``pl.EarlyStopping``, and note attributes that differ."""
        for departure in DEPARTURES:
            if node.attr in departure.attributes:
                self._note_departure(node, departure, node.attr)
        root, names = _split_chain(node)
        one = self.bound.get(root.id) if isinstance(root, ast.Name) else None
        if one is None or not one.is_module:
            self.generic_visit(node)
            return
        assert isinstance(root, ast.Name)
        path = one.path
        for number, (name, part) in enumerate(names):
            if f"{path}.{name}" in MODULES:
                path = f"{path}.{name}"
                if number == len(names) - 1 and name not in ("callbacks", "strategies"):
                    self._edit_after(root, part, "")
                continue
            self._exchange_attribute(root, part, name)
            break
        if root.id in ("lightning", "pytorch_lightning"):
            self._edit(root, "echelon")

    def _exchange_attribute(self, root: ast.Name, part: ast.Attribute, name: str) -> None:
        if not is_known(name):
            self._note(part, "no counterpart", f"{name}: Echelon has nothing like it")
            return
        self._note_name(part, name)
        if name in PUBLIC_AT_ROOT and has_counterpart(name):
            self._edit_after(root, part, f".{new_name(name)}")
        else:
            self._needs_elsewhere = True
            self._edit_after(root, part, f".lightning.{name}")

    # --- calls, methods, texts ---

    def visit_Call(self, node: ast.Call) -> None:
        """Note methods and constructors that differ, and replace renamed arguments."""
        kind, name = self._called(node)
        keywords = {keyword.arg: keyword for keyword in node.keywords if keyword.arg}
        for departure in DEPARTURES:
            for pattern in departure.classes if kind == "class" else departure.calls:
                called, _, argument = pattern.partition("(")
                is_asked = departure.is_missing and name != "Trainer"  # even None would be an unknown argument
                if called == name and (not argument or _is_given(argument[:-1], keywords, is_asked=is_asked)):
                    self._note_departure(node, departure, pattern)
        if kind == "class":
            self._visit_arguments(node, name, keywords)
        self.generic_visit(node)

    def _called(self, node: ast.Call) -> tuple[Literal["class", "method"], str]:
        root, names = _split_chain(node.func)
        last = names[-1][0] if names else root.id if isinstance(root, ast.Name) else ""
        one = self.bound.get(root.id) if isinstance(root, ast.Name) else None
        if one is not None and (one.is_module or not names):
            return "class", one.name if not one.is_module else last
        if isinstance(root, ast.Name) and root.id == "torch" and names:
            return "method", f"torch_{last}" if last in ("load", "save") else last
        return "method", last

    def _visit_arguments(self, node: ast.Call, name: str, keywords: dict[str, ast.keyword]) -> None:
        if not is_known(name) or not has_counterpart(name) or name not in PUBLIC_AT_ROOT:
            return
        taken = inspect.signature(
            find_replacement(new_name(name) if new_name(name) in PUBLIC_AT_ROOT else name)
        ).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()) and name != "Trainer"
        for argument, keyword in keywords.items():
            renamed = RENAMED_SETTINGS.get(f"{name}({argument})")
            if renamed is not None:
                start = self._offset(keyword.lineno, keyword.col_offset)
                self.edits[start, start + len(argument.encode())] = renamed
            elif argument not in taken and not takes_any and not self._is_noted(node.lineno, f"{name}({argument})"):
                hint = OF_LIGHTNING_1.get(argument) if name == "Trainer" else None
                says = f"use {hint}" if hint else f"Echelon's {new_name(name)} has no such argument"
                self._note(keyword, "no counterpart", f"{name}({argument}=): {says}")
        if name == "Trainer" and node.args:
            self._note(node, "departs", "Trainer(...): takes keyword arguments only")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note methods that differ, and hooks of Lightning 1."""
        arguments = [argument.arg for argument in node.args.args]
        if arguments[:1] == ["self"]:
            for departure, pattern in _PATTERNS_OF_METHODS:
                called, _, argument = pattern.partition("(")
                if called == node.name and (not argument or argument[:-1] in arguments):
                    self._note_departure(node, departure, pattern)
            if node.name in OLD_HOOKS:
                text = f"{node.name}: a hook of Lightning 1, which is never called; write {OLD_HOOKS[node.name]}"
                self._note(node, "no counterpart", text)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Note strings that differ."""
        for departure in DEPARTURES if isinstance(node.value, str) else ():
            for text in departure.texts:
                if text in str(node.value):
                    self._note_departure(node, departure, repr(text))

    # --- text ---

    def _edit(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.edits[self._range(node)] = text

    def _edit_after(self, root: ast.expr, part: ast.expr, text: str) -> None:
        self.edits[self._range(root)[1], self._range(part)[1]] = text

    def _range(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def edited(self) -> str:
        """Return the program with all replacements made."""
        if self._needs_elsewhere and self._first_import is not None:
            place = self._range(self._first_import)
            self.edits[place] = f"import {ELSEWHERE}\n{' ' * self._first_import.col_offset}{self.edits[place]}"
        result, at = [], 0
        for (start, end), text in sorted(self.edits.items()):
            result += [self._bytes[at:start], text.encode()]
            at = end
        return b"".join([*result, self._bytes[at:]]).decode()

    # --- notes ---

    def _note(self, node: ast.AST, kind: Kind, text: str) -> None:
        self.notes.append(Note(node.lineno, kind, text))  # type: ignore[attr-defined]

    def _note_departure(self, node: ast.AST, departure: Departure, what: str) -> None:
        self._note(
            node, "no counterpart" if departure.is_missing else "departs", f"{_format_pattern(what)}: {departure.says}"
        )

    def _is_noted(self, line: int, what: str) -> bool:
        return any(note.line == line and note.text.startswith(_format_pattern(what)) for note in self.notes)


def _is_given(argument: str, keywords: dict[str, ast.keyword], *, is_asked: bool) -> bool:
    name, _, kind = argument.partition("=")
    if name not in keywords:
        return False
    value = keywords[name].value
    if kind:
        return isinstance(value, ast.Dict)
    return is_asked or not (isinstance(value, ast.Constant) and value.value in (None, False))


def _format_pattern(pattern: str) -> str:
    if pattern.endswith("={})"):
        return pattern
    return f"{pattern[:-1]}=)" if pattern.endswith(")") else pattern.replace("torch_", "torch.")


def _split_chain(node: ast.expr) -> tuple[ast.expr, list[tuple[str, ast.Attribute]]]:
    """Return the expression at the root of ``a.b.c``, and its attributes in order."""
    names: list[tuple[str, ast.Attribute]] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, (node.attr, node))
        node = node.value
    return node, names
