"""Restarts, heartbeats and hang detection of elastic runs. Imports snapshots, launch and below."""
