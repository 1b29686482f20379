"""``python -m echelon`` is the ``echelon`` command."""

import sys

from .trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
