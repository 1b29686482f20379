"""YAML as people write it: keys in order, no anchors, multi-line texts as blocks, and comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import yaml

_WIDTH: Final = 120


class _Dumper(yaml.SafeDumper):
    """Writes each value in full, multi-line texts as blocks, and lists of words on one line."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    def represent_sequence_of(self, data: list[object]) -> yaml.SequenceNode:
        is_simple = all(isinstance(item, str | int) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_simple)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_sequence_of)


def yaml_text(documents: Iterable[Mapping[str, object]], heading: str, notes: Mapping[str, str]) -> str:
    """Return documents as YAML.

    Args:
        heading: a comment at the top.
        notes: comments, each for the end of a path of keys, such as ``resources.limits``; it is placed above the first
            match in the documents.
    """
    left = dict(notes)
    texts = [_render_document(document, left) for document in documents]
    return "\n".join([*_wrap_comment(heading, 0), "---\n".join(texts)])


def _render_document(document: Mapping[str, object], notes: dict[str, str]) -> str:
    text = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
    lines: list[list[str]] = [[line] for line in text.splitlines()]
    for path, mark in _iterate_keys(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        note_path = next((note for note in notes if f".{'.'.join(path)}".endswith(f".{note}")), None)
        if note_path is not None:
            lines[mark.line][:0] = _wrap_comment(notes.pop(note_path), mark.column)
    return "".join(f"{line}\n" for group in lines for line in group)


def _iterate_keys(node: yaml.Node | None, path: Sequence[str]) -> Iterator[tuple[Sequence[str], yaml.Mark]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark
            yield from _iterate_keys(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _iterate_keys(item, path)


def _wrap_comment(text: str, column: int) -> list[str]:
    indent = " " * column
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
