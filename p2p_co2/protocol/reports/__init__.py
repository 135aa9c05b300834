"""Reports: what a peer tells observers of itself, and how an observer reads it. A machine, both sides in one.

The peer's side (``Responder``) keeps its newest events and what the older ones come to; a request names the
last event that the asker has seen, the answer has what followed, signed. The observer's side (``Poller``)
asks each peer in turn, checks every answer (``reader``), and asks for the signed decisions of rounds, so that
whose work counted rests on the group's signatures and not on the teller's word.

Laws: an observer changes nothing: it is no member, peers learn nothing from it and never dial it; everything
a peer can make an observer hold, or an observer a peer, is bounded and the bound has a name; nonsense is
counted against its sender and goes no further.

Price: an observer that asks once a second costs a peer about a millisecond of its network thread each time.
"""

from p2p_co2.protocol.reports.poller import Poller
from p2p_co2.protocol.reports.reader import REPORT_CONTEXT, Opened, open_report
from p2p_co2.protocol.reports.responder import Responder

__all__ = ["REPORT_CONTEXT", "Opened", "Poller", "Responder", "open_report"]
