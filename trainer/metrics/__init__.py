"""`self.log`: values gathered on each rank and reduced when somebody reads them. Imports no other room."""
