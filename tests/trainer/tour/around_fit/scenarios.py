"""All scenarios around a fit, by name."""

import fit_ends  # noqa: F401 - each enters its own
import fit_notebooks  # noqa: F401
import fit_processes  # noqa: F401
import fit_signals  # noqa: F401
import fit_threads  # noqa: F401
import fit_trainers  # noqa: F401
from scenario import SCENARIOS as SCENARIOS
