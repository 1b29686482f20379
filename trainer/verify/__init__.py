"""A module on several layouts against one process, step by step, in float64. Imports the Trainer and below."""

from .layout import Layout as Layout
from .report import Report as Report
from .verify import verify as verify
