"""Engine: the strategy seam for a loop of one's own. Imports resume and below."""
