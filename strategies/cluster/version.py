"""Version of Echelon: the one place of the number, also where the package was not installed."""

from typing import Final

VERSION: Final = "0.2.0"
