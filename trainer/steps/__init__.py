"""The choice of a run's optimizer step, and the step through pipeline stages. Imports loop and below."""
