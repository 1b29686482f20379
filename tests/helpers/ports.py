"""Ports that nobody else takes before a test uses them."""

import random
import socket

_NEVER_GIVEN = range(12_000, 32_000)
"""Below the ports that the kernel gives to connections, and to listeners that ask for any: other tests have many."""


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_NEVER_GIVEN)  # tests seed the other generator
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
