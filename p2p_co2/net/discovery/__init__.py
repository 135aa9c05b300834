"""How peers find each other and the run: a hivemind DHT whose every record is signed."""

from p2p_co2.net.discovery.discovery import Discovery

__all__ = ["Discovery"]
