"""The library as users of training loops write it. ``join`` gives a ``Swarm``, which steps the optimizer,
exchanges, deals out data and gives the model back. ``Optimizer`` is the drop-in for loops that own their
steps. Below them is ``trainer.Peer``."""

from p2p_co2.swarm.data import shard
from p2p_co2.swarm.joining import join
from p2p_co2.swarm.optimizer import Optimizer
from p2p_co2.swarm.swarm import Swarm

__all__ = ["Optimizer", "Swarm", "join", "shard"]
