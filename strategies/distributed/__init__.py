"""Process groups, collectives over nested structures, and messages between processes. Imports cluster."""
