"""Echelon."""
