"""Commands that look before a run is paid for. Imports everything."""
