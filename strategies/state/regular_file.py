"""Regular files whose content may be forged, opened without waiting and read up to a bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

# O_NONBLOCK: opening a named pipe must not wait for a writer that never comes; Windows has neither flag
_READING: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, most: int | None = None) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: if it cannot be opened, has more than `most` bytes, or is a named pipe or a device, which might have no
            end.
    """
    descriptor = os.open(path, _READING)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a regular file but a folder", str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if most is not None and status.st_size > most:
            raise OSError(errno.EINVAL, f"larger than {most} bytes", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path, most) as file:
        return file.read(most)  # a file that grows meanwhile is cut
