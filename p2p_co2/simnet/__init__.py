"""Hundreds to thousands of peers in one thread on virtual time, driving the very ``Node`` of real peers.

``simulate(Settings(...))`` plays a run to its end and checks the laws at every step. What is played: links
with delay, jitter, two rates and loss, NAT, cuts; processes that crash, stall and come back; clocks that are
off; seeds that die; training at each peer's own speed. What is real: membership, rounds, catching up, and the
node that pumps them, message by message. Source of the idea: deterministic simulation of the whole system, as
FoundationDB tests itself (Zhou et al., SIGMOD 2021).

Price: tensors are whole numbers here (``work``), so nothing is learned about learning, and what the carriers
do inside (TLS, libp2p, threads) is not played.
"""

from __future__ import annotations

from p2p_co2.simnet.eventlog import EventLog
from p2p_co2.simnet.faults import Churn, Storm
from p2p_co2.simnet.laws import Violation
from p2p_co2.simnet.swarm import Result, Settings, Swarm, simulate

__all__ = ["Churn", "EventLog", "Result", "Settings", "Storm", "Swarm", "Violation", "simulate"]
