"""Sharded: a mapping whose entries are spread over the ranks, in the state that a strategy returns."""

from __future__ import annotations

from typing import Any


class Sharded(dict[str, Any]):
    """The entries that this rank owns; every other rank has others, under other names, and none has all.

    A strategy puts it where its ranks differ: ``{"state": Sharded(own), "param_groups": [...]}``. Every rank puts one
    there, if need be an empty one. A checkpoint holds the entries of all ranks, each written by its owner; they are
    loaded as one plain dict. What stands outside of it is equal on all ranks and written by rank 0. A DTensor needs no
    such mark: it knows itself which part of it is here.
    """
