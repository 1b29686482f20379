"""Account of a run's time: the ledger in its folder, and its totals. Imports strategies only."""
