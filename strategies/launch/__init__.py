"""Starting, watching and ending the processes of a run. Imports cluster and distributed."""
