"""Experts: layers of which each token uses a few parts, dealt over ranks. Imports tensor_parallel, module and below."""
