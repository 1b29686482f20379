"""Copies of the training state in the memory of the nodes. Imports state, launch and below."""
