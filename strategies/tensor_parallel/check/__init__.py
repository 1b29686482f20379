"""The check of a cut on the first micro-batch. Imports tensor_parallel and below."""
