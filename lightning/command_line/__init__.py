"""LightningCLI: a program's command line and config files, on jsonargparse. Imports lightning, trainer and below."""
