"""Device mesh, replicas, shards and gradient synchronization. Imports module and below."""
