"""The library's front door: ``connect`` to a run, ``start`` with a model and an inner optimizer, ``step``
after each inner step.

The only room that sees both wings: tensors (``worker``, ``fragment_state``) and messages (``node``).
"""

from p2p_co2.trainer.connection import Connection, connect, join
from p2p_co2.trainer.peer import Peer

__all__ = ["Connection", "Peer", "connect", "join"]
