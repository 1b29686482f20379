"""Choices of the command line: classes, optimizers, help, predictions. Imports the rest of cli."""
