"""Losses that are means over targets: what they were divided by, read from where it stands. Imports common."""
