"""Module that only the fork server imports, for its effect on the signals of workers.

``timeout``, ``scancel`` or a terminal signal every process of a run. The fork server would end, and nobody could report
the exit codes of workers; so it is started with these signals blocked. Its children inherit that and unblock them here.
"""

from __future__ import annotations

import os
import signal

from .worker import NOT_FOR_THE_FORK_SERVER

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_FORK_SERVER))
