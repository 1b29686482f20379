"""A member that waits for another node while there is none."""

import os
import signal
from pathlib import Path

import member

if os.environ["WORLD_SIZE"] == "1":
    Path(os.environ["WAITS"]).touch()
    signal.pause()
member.main()
