"""The `echelon` command. Imports everything."""
