"""Parts of finders: where steps can be tried, and what was measured. Imports figures and strategies."""
