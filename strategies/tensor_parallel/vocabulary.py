"""Vocabulary: the table of tokens and the head of a language model, which are cut if no plan names them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, Final

from torch import nn

from ..module.blocks import repeated_blocks
from .known_layers import is_plain_table
from .limits import LARGEST_DEGREE

_TIES: Final = ("__init__", "tie_weights", "_init_weights", "post_init")
"""Methods that read a weight before it is cut."""


def vocabulary_words(module: nn.Module, words: Collection[str]) -> dict[str, str]:
    """Return words for the head of a module, outside of its blocks, and the tables with as many tokens.

    Nothing is cut that is not called as a layer, as far as the code tells: other code computes with such a weight, or
    another module has it. A TrainModule's own layers are left alone.

    Args:
        module: the module.
        words: the names of layers that have a word.
    """
    outside = {name: one for name, one in outside_blocks(module).items() if "." in name and name not in words}
    tables = {name: one for name, one in outside.items() if type(one) is nn.Embedding and is_plain_table(one)}
    shapes = {tuple(table.weight.shape) for table in tables.values() if table.num_embeddings >= LARGEST_DEGREE}
    heads = {n: m for n, m in outside.items() if type(m) is nn.Linear and (m.out_features, m.in_features) in shapes}
    if len(heads) != 1:
        return {}
    ((name, head),) = heads.items()
    found = {name: "colwise_gather_output"}
    found |= {n: "embedding_rowwise" for n, table in tables.items() if table.weight.shape == head.weight.shape}
    own = [module.get_submodule(one) for one in found]
    is_shared = any(holder not in own for holder in _holders_of(module, [p for one in own for p in one.parameters()]))
    leaves = {one.rpartition(".")[2] for one in found}
    kinds: set[object] = {type(part) for part in module.modules()}
    is_read = any(leaves & _weights_read_by(kind) for kind in kinds)
    return {} if is_shared or is_read else found


def outside_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a module that are in none of its repeated blocks, by name."""
    blocks = tuple(f"{name}." for name, _ in repeated_blocks(module))
    return {name: one for name, one in module.named_modules() if not name.startswith(blocks)}


def reads_weight(holder: nn.Module, name: str) -> bool:
    """Return whether a module's code computes with the weight of a layer itself, as Mamba's does."""
    kind: object = type(holder)
    return name in _weights_read_by(kind)


def _holders_of(module: nn.Module, parameters: Collection[nn.Parameter]) -> Iterator[nn.Module]:
    """Yield the modules that have one of some parameters."""
    for part in module.modules():
        if any(own is one for own in part.parameters(recurse=False) for one in parameters):
            yield part


@lru_cache(maxsize=4096)
def _weights_read_by(kind: Any) -> frozenset[str]:
    """Return the names of the attributes whose ``weight`` or ``bias`` the methods of a class read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    methods = [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) and part.name not in _TIES]
    reads = (part.value for one in methods for part in ast.walk(one)
             if isinstance(part, ast.Attribute) and part.attr in ("weight", "bias"))  # fmt: skip
    return frozenset(part.attr for part in reads if isinstance(part, ast.Attribute))
