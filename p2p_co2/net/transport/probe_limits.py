"""What one may ask of a prober, so that probes can neither load it nor be turned against somebody else.

Laws: a connection back goes to the address at which the asker is seen and to no other, whatever it announces;
its port alone is the asker's choice. Per address (an IPv6 network of 64 bits counts as one) and in all, dials
and bytes are bounded per minute; one bulk measurement runs at a time, and no address has that one place for
more than ``MAX_BULK_S_PER_ADDRESS`` of a minute. Pure but for the times handed in; at
most ``MAX_ADDRESSES`` addresses are remembered. Price: behind one shared router many askers share its
allowance.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from p2p_co2.errors import RemoteProtocolError

WINDOW_S = 60.0
MAX_DIALS, MAX_DIALS_PER_ADDRESS = 60, 8
MAX_BULK_BYTES = 4 << 20
"""Of one measurement in one direction."""
MAX_BULK_BYTES_PER_ADDRESS, MAX_BULK_BYTES_OF_ALL = 24 << 20, 96 << 20
MAX_BULK_S_PER_ADDRESS = 20.0
MAX_ADDRESSES = 1024
MAX_EXPECT_BYTES = 32
MAX_HOST_CHARACTERS = 253
BUSY = "measuring with somebody else; try again in a moment"


@dataclass
class _Spent:
    """What an address used: (when, how much), oldest first."""

    dials: deque[tuple[float, float]] = field(default_factory=deque)
    bulk: deque[tuple[float, float]] = field(default_factory=deque)
    bulk_s: deque[tuple[float, float]] = field(default_factory=deque)


class ProbeLimits:
    """Admits or refuses; a refusal is a ``RemoteProtocolError`` with its reason in words."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _Spent] = OrderedDict()
        self._all = _Spent()
        self.bulk_running = False
        self._measuring = _Spent(), 0.0
        """Whose measurement runs (or ran last), and since when."""

    def dial(self, address: str, now: float) -> None:
        """Count a connection back to ``address``."""
        spent = self._spent(address)
        if _used(spent.dials, now) >= MAX_DIALS_PER_ADDRESS or _used(self._all.dials, now) >= MAX_DIALS:
            raise RemoteProtocolError("busy", "asked to connect back too often; try again in a minute")
        for used in (spent.dials, self._all.dials):
            used.append((now, 1))

    def bulk(self, address: str, size_bytes: int, now: float) -> None:
        """Count a measurement of ``size_bytes`` and take the one place for it until ``end_bulk``."""
        spent = self._spent(address)
        if not 0 < size_bytes <= MAX_BULK_BYTES:
            raise RemoteProtocolError("too large", f"{size_bytes} bytes; at most {MAX_BULK_BYTES}")
        if self.bulk_running:
            raise RemoteProtocolError("busy", BUSY)
        if (
            _used(spent.bulk, now) + size_bytes > MAX_BULK_BYTES_PER_ADDRESS
            or _used(self._all.bulk, now) + size_bytes > MAX_BULK_BYTES_OF_ALL
            or _used(spent.bulk_s, now) >= MAX_BULK_S_PER_ADDRESS
        ):
            raise RemoteProtocolError("busy", "asked to measure too often; try again in a minute")
        for used in (spent.bulk, self._all.bulk):
            used.append((now, size_bytes))
        self.bulk_running, self._measuring = True, (spent, now)

    def end_bulk(self, now: float) -> None:
        """The measurement is over, however it ended."""
        spent, began_at = self._measuring
        spent.bulk_s.append((now, now - began_at))
        self.bulk_running = False

    def _spent(self, address: str) -> _Spent:
        key = network_of(address)
        spent = self._of.setdefault(key, _Spent())
        self._of.move_to_end(key)
        while len(self._of) > MAX_ADDRESSES:
            self._of.popitem(last=False)
        return spent


def network_of(address: str) -> str:
    """What counts as one asker: an IPv4 address, or the 64-bit network of an IPv6 address."""
    parsed = ipaddress.ip_address(address)
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def _used(spent: deque[tuple[float, float]], now: float) -> float:
    while spent and spent[0][0] <= now - WINDOW_S:
        spent.popleft()
    return sum(amount for _, amount in spent)


def address_of(maddr: str) -> tuple[str, int] | None:
    """("203.0.113.5", 31000) of the multiaddr of a direct TCP connection; None for a relayed or other one."""
    fields = maddr.split("/")
    if "p2p-circuit" in fields or len(fields) < 5 or fields[1] not in {"ip4", "ip6"} or fields[3] != "tcp":
        return None
    try:
        address, port = ipaddress.ip_address(fields[2]), int(fields[4])
    except ValueError:
        return None
    return (str(address), port) if 0 < port < 65536 else None


def check_dial_back(port: int, expect: bytes, host: str, observed: str) -> str:
    """The address that a connection back may go to. Raises ``RemoteProtocolError``."""
    place = address_of(observed)
    if place is None:
        raise RemoteProtocolError(
            "relayed", "seen through a relay only, so there is no address to connect to"
        )
    if not 0 < port < 65536 or not 0 < len(expect) <= MAX_EXPECT_BYTES or len(host) > MAX_HOST_CHARACTERS:
        raise RemoteProtocolError("wrong question", "port, host or expected bytes out of bounds")
    return place[0]
