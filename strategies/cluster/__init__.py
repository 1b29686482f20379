"""Launchers, devices, networks and stores: what this process runs on. Imports common only."""
