"""Checkpoints in object stores: complete once their manifest is there, without a rename. Imports common."""
