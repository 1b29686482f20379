"""One run: its settings, its parts and its counters. Imports data and below."""
