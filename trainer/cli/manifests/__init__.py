"""Scripts and manifests for cluster schedulers, rendered from a config. Imports strategies."""
