"""State on disk and state as bytes: the agreed state of a fragment, canonical (``agreed``), and a peer's
whole checkpoint in one file (``folder``). Never pickle."""

from p2p_co2.checkpoint.agreed import (
    state_bytes,
    state_digest,
    state_from_bytes,
    state_size_bytes,
    state_view,
    swarm_digest,
)
from p2p_co2.checkpoint.folder import Agreed, Checkpoint, Saving, Values, load, load_agreed, save
from p2p_co2.checkpoint.tensorfile import reserve

__all__ = [
    "Agreed",
    "Checkpoint",
    "Saving",
    "Values",
    "load",
    "load_agreed",
    "reserve",
    "save",
    "state_bytes",
    "state_digest",
    "state_from_bytes",
    "state_size_bytes",
    "state_view",
    "swarm_digest",
]
