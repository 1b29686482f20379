"""`self.log`: values gathered on each rank and reduced when they are read. Imports no other room."""
