"""Fabric: Lightning's names for a loop of your own, over the Engine. Imports lightning, trainer and below."""
