"""Lightning's Tuner: searches for a learning rate or a batch size before a fit. Imports trainer and below."""
