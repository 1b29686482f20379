"""Module that the processes of a run import first, while one of Lightning's own tests runs: see own_tests_run.py."""

from __future__ import annotations

import os
from pathlib import Path

from own_tests_run import stand_in

stand_in(Path(os.environ["OWN_TESTS_TREE"]))
