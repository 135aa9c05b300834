"""p2p-co2: volunteers train one PyTorch model together over the internet.

    import p2p_co2 as co2

    with co2.join(model, optimizer, run=TICKET) as swarm: ...

The front door for one's own training loop is ``join``; the programs are ``p2p-co2 seed``, ``join`` and
``demo``. Names below are loaded when first used, so that a program that needs no torch does not pay for it.

Nothing is imported here that takes time: the command line's handler of Ctrl-C comes after this.
"""

from __future__ import annotations

import importlib
import os
import sys

from p2p_co2.version import __version__

TYPE_CHECKING = False  # as ``typing`` has it, which takes milliseconds to import
if TYPE_CHECKING:
    from p2p_co2 import integrations
    from p2p_co2.config import PeerConfig, RunConfig
    from p2p_co2.swarm import Optimizer, Swarm, join, shard
    from p2p_co2.testing import local_swarm
    from p2p_co2.trainer import Connection, Peer, connect

# Torch takes its large tensors in huge pages if it is not imported yet, as in ``p2p-co2 join``. A user's own
# setting stands.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# gRPC starts its threads anew in each forked child, as a DataLoader's workers are, to go on with connections
# that are the parent's: they end the child by a segmentation fault now and then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if sys.stderr is None:  # closed before the start: hivemind asks it things, and ``print`` takes stdout for it
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process

__all__ = [
    "Connection", "Optimizer", "Peer", "PeerConfig", "RunConfig", "Swarm", "__version__", "connect",
    "integrations", "join", "local_swarm", "shard",
]  # fmt: skip
_ROOMS = {
    "PeerConfig": "config", "RunConfig": "config", "Connection": "trainer", "Peer": "trainer",
    "connect": "trainer", "Optimizer": "swarm", "Swarm": "swarm", "join": "swarm", "shard": "swarm",
    "local_swarm": "testing",
}  # fmt: skip
"""Where each name is loaded from."""


def __getattr__(name: str) -> object:
    if name == "integrations":
        return importlib.import_module("p2p_co2.integrations")
    if name in _ROOMS:
        return getattr(importlib.import_module(f"p2p_co2.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
