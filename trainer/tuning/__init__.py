"""Steps that are tried and taken back, and what finders set for the run. Imports resume and below."""
