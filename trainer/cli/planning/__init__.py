"""Commands that tell before a run what it would need, and their figures. Imports everything but other commands."""
