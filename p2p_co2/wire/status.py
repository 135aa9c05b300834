"""What a peer says of itself, taken out of its message once: checked, and in plain values that are cheap to
look at again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.wire.limits import MAX_FRAGMENTS, MAX_VERSION
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.names import is_name

_DIGEST_LENGTHS = frozenset({32})


class PeerStatus(NamedTuple):
    """The fields of ``Status`` that peers go by; what comes after ``counted`` changes all the time and is no
    news."""

    phase: Status.Phase = Status.JOINING
    versions: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    finished: bytes = b""
    settled: bool = False
    counted: bool = False
    position: float = 0.0
    heartbeat_s: float = 0.0
    process: int = 0
    model: int = 0
    name: str = ""
    visits: bool = False

    def is_news_after(self, known: PeerStatus) -> bool:
        return self[:8] != known[:8]

    def offers_for(self, fragment: int) -> bool:
        """Whether it trains and has not said that it is done with ``fragment``."""
        is_done = int.from_bytes(self.finished, "little") >> fragment & 1
        return self.phase == Status.TRAINING and not is_done


def finished_bits(finished: Iterable[int], fragments: int) -> bytes:
    """``Status.finished``: empty if nothing is finished."""
    bits = sum(1 << fragment for fragment in finished)
    return bits.to_bytes(-(-fragments // 8) if bits else 0, "little")


def read_status(status: Status) -> PeerStatus:
    """Raises ``RemoteProtocolError`` for a status that cannot be true."""
    read = PeerStatus(  # a slice of a repeated field is made twice as quickly as it is gone through
        status.phase, tuple(status.versions[:]), tuple(status.digests[:]), status.upload_bytes_per_s,
        status.download_bytes_per_s, status.finished, status.settled, status.counted, status.position,
        status.heartbeat_s, status.process, status.model, status.name if is_name(status.name) else "",
        status.visits,
    )  # fmt: skip
    for number in (read.position, read.upload_bytes_per_s, read.download_bytes_per_s, read.heartbeat_s):
        if not 0 <= number < 1e18:  # NaN fails every comparison
            raise RemoteProtocolError(Offence.BAD_STATUS, f"position or rate out of range: {number}")
    versions = read.versions
    digests = read.digests
    if 8 * len(read.finished) > MAX_FRAGMENTS + 7:
        raise RemoteProtocolError(Offence.BAD_STATUS, f"{8 * len(read.finished)} finished fragments")
    if len(versions) > MAX_FRAGMENTS or len(digests) not in (0, len(versions)):
        raise RemoteProtocolError(Offence.BAD_STATUS, "versions and digests do not belong together")
    if versions and max(versions) > MAX_VERSION:
        raise RemoteProtocolError(Offence.BAD_STATUS, f"a version of {max(versions)}")
    if not _DIGEST_LENGTHS.issuperset(map(len, digests)):
        raise RemoteProtocolError(Offence.BAD_STATUS, "a digest has the wrong length")
    return read
