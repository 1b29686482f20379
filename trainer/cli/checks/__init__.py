"""Commands that check a machine or a module before a run is paid for. Imports everything."""
