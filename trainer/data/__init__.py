"""Loaders as resumable streams of micro-batches. Imports module and below."""
