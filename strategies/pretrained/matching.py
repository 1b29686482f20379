"""Matching: which tensors of a model a folder has, and one error for all that it has not, or has in another shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError
from ...common.internals.hugging_face import list_missing_patterns, list_unexpected_patterns
from ..state.sources import TensorSource
from .conversions import NamedSources, is_of_transformers
from .derived_sources import read_whole
from .find_folder import config_of

_SHOWN: Final = 8


@dataclass(frozen=True)
class Match:
    """The tensors of a model, each with its source."""

    sources: Mapping[str, TensorSource]
    tensors: Mapping[str, Tensor]
    """Those of the model, by the same names; tied ones once."""
    resized: Collection[str] = ()
    """The names of those of which only the first rows are in the folder, or are used."""


def matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches a pattern, or is of a submodule whose name does."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def match_sources(
    model: nn.Module, named: NamedSources, *, resize: Sequence[str], ignore: Sequence[str], folder: Path
) -> Match:
    """Match sources with the tensors of a model's state.

    Args:
        model: the model.
        named: the sources by the model's names.
        resize: patterns of tensors that may have another number of rows.
        ignore: patterns of tensors that stay as they are, or that are left in the folder.
        folder: the folder, for the error.

    Raises:
        CheckpointError: naming all tensors that are missing, unexpected or of another shape.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    names = _names_of_each(state)
    sources, tensors, resized = dict[str, TensorSource](), dict[str, Tensor](), list[str]()
    missing, mismatched = list[str](), list[str]()
    for group in names:
        name = next((name for name in group if name in named.found), None)
        is_ignored = any(matches_any_pattern(other, ignore) for other in group)
        if is_ignored:
            continue
        if name is None:
            missing.append(group[0])
            continue
        source, tensor = named.found[name], state[name]
        is_resized = any(matches_any_pattern(other, resize) for other in group) and _differ_in_rows(
            source.shape, tensor.shape
        )
        if source.shape != tensor.shape and not is_resized:
            mismatched.append(f"{name}: {tuple(tensor.shape)} here, {tuple(source.shape)} in the folder")
            continue
        sources[name], tensors[name] = source, tensor
        resized += [name] if is_resized else []
    unexpected = {
        name: saved
        for name, saved in named.unexpected.items()
        if not matches_any_pattern(name, ignore) and not matches_any_pattern(saved, ignore)
    }
    missing, unexpected = _without_harmless(model, missing, unexpected)
    if missing or unexpected or mismatched:
        raise _mismatch_error(model, named, (missing, unexpected, mismatched), folder)
    for group in names:
        _check_tied([name for name in group if name in named.found], named.found)
    return Match(sources, tensors, resized)


def _names_of_each(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor: several for a tied one."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _differ_in_rows(one: torch.Size, other: torch.Size) -> bool:
    return bool(one) and bool(other) and one != other and one[1:] == other[1:]


def _check_tied(held: Sequence[str], found: Mapping[str, TensorSource]) -> None:
    """Check that a folder which has several names of a tied tensor has the same values under them."""
    for other in held[1:]:
        if not torch.equal(read_whole(found[held[0]]), read_whole(found[other])):
            raise CheckpointError(
                f"{held[0]} and {other} are one tensor in this model, but differ in the folder; build the model with "
                "tie_word_embeddings=False in its config."
            )


def _without_harmless(
    model: nn.Module, missing: list[str], unexpected: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Leave out what a model of transformers says may be missing, or may be left in a folder."""
    if not is_of_transformers(model):
        return missing, unexpected
    may_lack = list_missing_patterns(model)
    may_have = list_unexpected_patterns(model)
    buffers = [name.rpartition(".")[2] for name, _ in model.named_buffers()]
    # once saved, now computed by the model
    may_have += [rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if name in buffers]
    return (
        [name for name in missing if not any(re.search(pattern, name) for pattern in may_lack)],
        {name: s for name, s in unexpected.items() if not any(re.search(pattern, name) for pattern in may_have)},
    )


def _mismatch_error(
    model: nn.Module,
    named: NamedSources,
    differences: tuple[Sequence[str], Mapping[str, str], Sequence[str]],
    folder: Path,
) -> CheckpointError:
    own, (missing, unexpected, mismatched) = list(model.state_dict(keep_vars=True)), differences
    lines = [f"{folder} does not fit {type(model).__name__}."]
    lines += _format_section(
        "missing in the folder", [_add_nearest_name(name, unexpected, "it has") for name in missing]
    )
    shown = [_add_nearest_name(name, missing or own, "the model has") for name in unexpected]
    lines += _format_section("not in the model", shown)
    lines += _format_section("of another shape", mismatched)
    if not named.found:
        remedy = "No name fits: it is the folder of another model; build the model from its config.json."
    elif mismatched and not missing and not unexpected:
        name = mismatched[0].partition(":")[0]
        remedy = (
            f"For another vocabulary give resize=[{name!r}, ...], which keeps the values that the model has in its "
            f"further rows; for a new head ignore=[{name!r}, ...]; else build the model from the folder's config.json."
        )
    else:
        first = [name.rpartition(".")[0] or name for name in (*missing, *unexpected)][:1]
        remedy = (
            f"For a new head, or an old one that is not needed, give ignore={first}; else build the model that the "
            "folder's config.json describes."
        )
    kind, here = config_of(folder).get("model_type"), getattr(getattr(model, "config", None), "model_type", None)
    if kind and here and kind != here:
        lines.append(f"Its config.json is of a {kind!r} model, this one is a {here!r}.")
    return CheckpointError("\n".join([*lines, remedy]))


def _format_section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    rest = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines[:_SHOWN]), *rest]


def _add_nearest_name(name: str, others: Iterable[str], word: str) -> str:
    near = get_close_matches(name, list(others), n=1, cutoff=0.6)
    return f"{name} ({word} {near[0]})" if near else name
