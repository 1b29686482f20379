"""One of two nodes: meets the other and reports it; the first then dies, the second continues, and cuts its cable."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from two_nodes import INTERFACE

from echelon.common.errors import ProcessError
from echelon.strategies.resilience import store_process
from echelon.strategies.resilience.elastic_rendezvous import make_rendezvous

LISTENING = "0A"


def say(**seen):
    os.write(1, f"{json.dumps(seen)}\n".encode())


def listening():
    """Return the addresses and ports, as the kernel writes them, on which anybody listens in this namespace."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENING]


def meet(node):
    info = node.next_rendezvous()
    place = info.bootstrap_store_info
    say(rank=info.rank, total=info.world_size, main_address=place.master_addr, listening=listening())
    return info.rank


def main(endpoint):
    store_process._SILENCE = 2  # seconds, for the sake of those who wait for the test
    limit = timedelta(seconds=60)
    node = make_rendezvous(nodes=(1, 2), endpoint=endpoint, run_id="run", start_timeout=limit, last_call=limit)
    if meet(node) == 0:
        node.notices.post("from", "the first")
        os.kill(os.getpid(), signal.SIGKILL)
    while not node.num_nodes_lost():
        time.sleep(0.1)
    meet(node)
    say(shared=node.notices.read("from"))
    subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
    start = time.monotonic()
    try:
        while True:
            node.num_nodes_waiting()
            time.sleep(0.1)
    except ProcessError as error:
        say(error=str(error), seconds=time.monotonic() - start)
    node.release()


if __name__ == "__main__":
    main(sys.argv[1])
