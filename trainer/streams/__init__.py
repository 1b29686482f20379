"""Streams: iterable data sets dealt over data ranks and workers, with their states. Imports module and below."""
