"""Modules that lie on ranks: how they compute, update and are saved. Imports the rooms of strategies below it."""
