"""Orders and batches for samples that are too many to list or differ in length. Imports data and below."""
