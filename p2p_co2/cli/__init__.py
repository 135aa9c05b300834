"""The console script ``p2p-co2``: ``main`` reads the command line; each other file holds some commands."""

from p2p_co2.system import ctrl_c

ctrl_c.answer()  # before all that takes time

from p2p_co2.system.process import own_packages_first  # noqa: E402

own_packages_first()  # before ``main`` imports ``bootstrap``, which may be a user's own module
