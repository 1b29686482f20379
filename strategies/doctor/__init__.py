"""Checks of a machine and of the network between nodes, before a run is paid for. Imports launch and below."""
