"""The Trainer, and the rooms it is made of. Imports strategies and callbacks."""
