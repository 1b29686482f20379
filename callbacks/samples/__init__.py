"""The files of a sample ledger and their audit. Imports strategies only."""
