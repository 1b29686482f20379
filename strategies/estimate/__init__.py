"""Estimates of what a step holds and sends under each strategy. Imports the strategies and below."""
