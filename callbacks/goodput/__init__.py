"""Account of a run's time: the ledger in its folder, and what it adds up to. Imports strategies only."""
