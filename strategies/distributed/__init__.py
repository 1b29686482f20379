"""Process groups and collectives over nested values. Imports cluster."""
