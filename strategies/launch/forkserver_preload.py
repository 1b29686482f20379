"""What the fork server imports last, and nobody else: here, being imported has an effect.

``timeout``, ``scancel`` or a terminal signal every process of a run. The fork server would end, and with it the news
of how the workers did; so it is started with these signals blocked, and its children, which inherit that, unblock them.
"""

from __future__ import annotations

import os
import signal

from .worker import NOT_FOR_THE_FORK_SERVER

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_FORK_SERVER))
