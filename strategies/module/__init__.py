"""Preparing a module: precision, activation checkpointing, deferred init. Imports state and below."""
