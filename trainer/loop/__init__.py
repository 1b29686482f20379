"""The training loop, the optimizer step and the evaluation loop. Imports session and below."""
