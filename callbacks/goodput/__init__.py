"""Where the time of a run went: spans and their ledger. Imports strategies only."""
