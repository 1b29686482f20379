"""Who started this process and what it runs on: launchers, devices, network, stores. Imports errors only."""
