"""WebFiles: fsspec's filesystem of HTTP, with the listings, sizes and ranges that those of stores have."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class WebFiles:
    """Files of web servers, to be read. A folder is a page of links, of which those to what is below it count.

    Args:
        fs: fsspec's filesystem; its own search follows links to the folder above, and its listings have no sizes.
    """

    def __init__(self, fs: AbstractFileSystem) -> None:
        self._fs = fs

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes from `start` up to `end`."""
        content: bytes = self._fs.cat_file(path, start=start, end=end)
        if start is not None and end is not None and len(content) > end - start:  # all of it
            _tell_of_ranges(path.rsplit("/", 1)[0])
            return content[start:end]
        return content

    def get_file(self, path: str, file: str) -> None:
        """Write a file to a local one, in one request."""
        self._fs.get_file(path, file)

    def info(self, path: str) -> dict[str, object]:
        """Return what the server says of a file; a folder is one whose request is redirected to its page."""
        found: dict[str, object] = self._fs.info(path)
        return {**found, "type": "directory"} if str(found.get("url", "")).endswith("/") else found

    def ls(self, path: str, detail: bool = True) -> Sequence[dict[str, Any]]:
        """Return the entries of a folder, without their sizes."""
        found = [{**one, "name": unquote(one["name"])} for one in self._fs.ls(path) if not set("?#") & set(one["name"])]
        folder = f"{unquote(path).rstrip('/')}/"
        return [one for one in found if one["name"].startswith(folder) and one["name"] != folder]

    def find(self, path: str, detail: bool = True) -> dict[str, dict[str, object]]:
        """Return the files below a folder, at any depth."""
        found: dict[str, dict[str, object]] = {}
        for one in self.ls(path):
            name = one["name"].rstrip("/")
            found.update(self.find(name) if one["type"] == "directory" else {name: self.info(name)})
        return found


@functools.cache
def _tell_of_ranges(folder: str) -> None:
    warnings.warn(
        f"{folder} ignores the range of bytes that a request asks for, so all of a file comes for each part of it; use "
        "a server that answers ranges (nginx, Apache, a bucket), or download the files first.",
        stacklevel=2,
    )
