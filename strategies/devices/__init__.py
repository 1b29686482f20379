"""Devices: what they have and can do, and moves to them, asked of torch for every type alike. Imports common."""
