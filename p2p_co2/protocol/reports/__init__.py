"""Reports: what a peer tells observers of itself, and how an observer reads it. A machine, both sides in one.

The peer's side (``Responder``) keeps its newest events and what the older ones come to; the answer to a
request has what followed the last event that the asker has seen, signed. The observer's side (``Poller``)
asks each peer in turn and checks every answer (``reader``). Laws: an observer is no member and changes
nothing; everything a peer can make an observer hold, or an observer a peer, is bounded; nonsense is counted
against its sender.
"""

from p2p_co2.protocol.reports.poller import Poller
from p2p_co2.protocol.reports.reader import REPORT_CONTEXT, open_report
from p2p_co2.protocol.reports.responder import Responder

__all__ = ["REPORT_CONTEXT", "Poller", "Responder", "open_report"]
