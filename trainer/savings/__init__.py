"""Savings: what the time of a run's steps goes to, and what would shorten them most. Imports planning and below."""
