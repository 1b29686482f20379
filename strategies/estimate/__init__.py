"""Estimates of what a step holds and sends under each strategy. Imports parallel, module and below."""
