"""p2p-co2: volunteers train one PyTorch model together over the internet.

The front door for one's own training loop is ``join``; the programs are ``p2p-co2 seed``, ``join`` and
``demo``. Names below are loaded when first used, so that a program that needs no torch does not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_co2.memory import ask_for_huge_pages

if TYPE_CHECKING:
    from p2p_co2.config import PeerConfig, RunConfig
    from p2p_co2.trainer import Connection, Peer, connect, join

ask_for_huge_pages()  # before torch makes its first tensor

__version__ = "0.1.0"
__all__ = ["Connection", "Peer", "PeerConfig", "RunConfig", "__version__", "connect", "join"]


def __getattr__(name: str) -> object:
    if name in {"PeerConfig", "RunConfig"}:
        from p2p_co2 import config

        return getattr(config, name)
    if name in {"Connection", "Peer", "connect", "join"}:
        from p2p_co2 import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
