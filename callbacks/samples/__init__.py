"""Which samples were used: the file and its audit. Imports strategies only."""
