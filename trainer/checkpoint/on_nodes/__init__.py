"""Checkpoints on disks that nodes do not share: a part on each. Imports strategies and the checkpoints around it."""
