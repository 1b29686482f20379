"""Errors, and small helpers for every room: console, tables, paths, durations. Imports nothing of Echelon."""
