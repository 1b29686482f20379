"""Losses of logits that are never in memory as a whole. Imports tensor_parallel, module and below."""
