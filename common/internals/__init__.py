"""Private names of Python, NumPy, torchmetrics and Hugging Face, each behind a function. Imports nothing of Echelon."""
