"""Launch, supervision and end of the processes of a run. Imports cluster and distributed."""
