"""Private names of torch, each read or changed by one function, and the versions that have them. Imports common."""
