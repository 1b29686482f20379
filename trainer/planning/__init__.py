"""Planning of a run: its profile, the layouts that are possible, and the one to choose. Imports resume and below."""
