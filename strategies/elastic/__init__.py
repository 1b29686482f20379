"""A strategy that contains another, and what lets its run outlive workers and nodes."""
