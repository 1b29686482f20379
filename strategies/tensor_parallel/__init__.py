"""Layers cut across ranks: plans, the cut itself, and its check. Imports context_parallel, module and below."""
