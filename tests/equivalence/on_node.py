"""A process of two nodes: trains the cases of a line of the matrix; rank 0 leaves in a file what came of them.

Usage: on_node.py NUMBER_OF_LINE FILE
"""

import os
import pickle
import sys
from pathlib import Path

from matrix import LINES, train_all

if __name__ == "__main__":
    ends = train_all(LINES[int(sys.argv[1])])
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_bytes(pickle.dumps(ends))
