"""Lightning's callbacks and plugins that Echelon has none of its own for. Imports trainer and below."""
