"""State on disk and state as bytes: the agreed state of a fragment, canonical (``agreed``), and a peer's
whole checkpoint in one file (``folder``). Never pickle."""

from p2p_co2.tensors.checkpoint.agreed import (
    state_bytes,
    state_digest,
    state_from_bytes,
    state_size_bytes,
    state_view,
    swarm_digest,
)
from p2p_co2.tensors.checkpoint.folder import (
    Checkpoint,
    InnerOptimizer,
    Owned,
    Saving,
    Values,
    has_checkpoint,
    load,
    load_agreed,
    parts,
    save,
    set_aside,
)
from p2p_co2.tensors.checkpoint.tensorfile import trouble_with
from p2p_co2.tensors.checkpoint.tree import Said, say

__all__ = [
    "Checkpoint",
    "InnerOptimizer",
    "Owned",
    "Said",
    "Saving",
    "Values",
    "has_checkpoint",
    "load",
    "load_agreed",
    "parts",
    "save",
    "say",
    "set_aside",
    "state_bytes",
    "state_digest",
    "state_from_bytes",
    "state_size_bytes",
    "state_view",
    "swarm_digest",
    "trouble_with",
]
