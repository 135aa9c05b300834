"""A whole swarm, 64 peers at most, in one thread on virtual time, driving the very ``Node`` of real peers.

``VirtualSwarm(Settings(...), EventLog()).run()`` plays a run to its end and checks the laws at every step.
Played are links with delay, jitter, two rates and loss; NAT and cuts; processes that crash, stall and come
back; clocks that are off; seeds that die; steps at each peer's own speed. Real are, message by message,
membership, rounds, catching up, the node that pumps them, the training thread's synchroniser. Source of the
idea: deterministic simulation of the whole system, as FoundationDB tests itself (Zhou et al., SIGMOD 2021).

Price: tensors are whole numbers here (``ledger``), so nothing is learned about learning. What the carriers
and the links do inside (TLS, libp2p, threads, turns on the line) is not played.
"""

from __future__ import annotations

from p2p_co2.simnet.campaign import Churn, Storm
from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.laws import Violation
from p2p_co2.simnet.oversight import Result
from p2p_co2.simnet.scene import Settings
from p2p_co2.simnet.swarm import VirtualSwarm

__all__ = ["Churn", "EventLog", "Result", "Settings", "Storm", "Violation", "VirtualSwarm"]
