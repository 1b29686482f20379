"""Parts of finders: the check that steps can be tried, and the results. Imports figures and strategies."""
