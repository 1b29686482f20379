"""What schedulers are told of a run: scripts and manifests, rendered from its config."""
