"""State by parameter name: DTensors, optimizer state, lazy tensors. Imports cluster and distributed."""
