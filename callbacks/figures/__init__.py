"""Figures drawn with matplotlib, and the files that they become. Imports strategies only."""
