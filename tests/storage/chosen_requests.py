"""Requests of an action that are to fail in turn: in a sweep all of them, else one of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs

from proxy import Request
from sweep import IS_SWEEP


def chosen(requests: Sequence[Request]) -> list[int]:
    """Return the places of the requests that are to fail: in a sweep all, else the first of each kind.

    Of a kind are those of one method that name the same file, or list a folder, with the same fields of a query.
    """
    if IS_SWEEP:
        return list(range(len(requests)))
    first: dict[tuple[str, ...], int] = {}
    for place, request in enumerate(requests):
        path, _, query = request.target.partition("?")
        first.setdefault((request.method, path.rpartition("/")[2], *sorted(parse_qs(query))), place)
    return list(first.values())
