"""Memory of this process, as the system counts it."""

from __future__ import annotations

import sys


def peak_of_process() -> int:
    """Return the most bytes that this process has held; 0 where the system does not say, as on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
