"""Devices: what they are, have and can do, asked of torch for every type alike. Imports common and torch's names."""
