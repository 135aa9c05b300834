"""The console script ``p2p-co2``: ``main`` reads the command line; each other file holds some commands."""
