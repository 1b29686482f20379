"""Starting the fork server changes the caller's process only for a moment."""

import os
from concurrent.futures import ThreadPoolExecutor

from echelon.strategies.launch.fork_server import preload


def test_threads_that_ask_for_it_at_once_leave_the_environment_as_it_was():
    before = dict(os.environ)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(preload, ["colorsys"]) for _ in range(400)]:
            done.result()
    assert dict(os.environ) == before
