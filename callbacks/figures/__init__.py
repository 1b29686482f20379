"""Figures drawn with matplotlib, and their files. Imports strategies only."""
