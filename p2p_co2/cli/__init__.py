"""The console script ``p2p-co2``: ``main`` reads the command line; each other file holds some commands."""

from p2p_co2.system import ctrl_c  # noqa: F401  # before all that takes time

# isort: split
from p2p_co2.system.process import own_packages_first

own_packages_first()  # before ``main`` imports ``bootstrap``, which may be a user's own module
