"""Engine: the strategy seam for a user's own loop. Imports resume and below."""
