"""What was found, and what it means for taking part.

The exit status and the role follow from the findings alone. 2: one of them forbids taking part. 1: one limits
it or, once a swarm was asked, is not known. Else 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from p2p_co2.config import RunConfig

NOTHING_TO_DO = "nothing to do"


class Grade(StrEnum):
    """``limited``: works, with less. ``cannot``: does not work at all."""

    OK = "ok"
    LIMITED = "limited"
    CANNOT = "cannot"
    UNKNOWN = "unknown"


class PeerRole(StrEnum):
    """How this peer will meet the others."""

    DIRECT = "direct: others can dial this peer"
    DIAL_OUT = "dial-out only: this peer dials others, or meets them through a relay"
    NONE = "none: this machine cannot take part as it is"
    UNKNOWN = "unknown: no swarm was asked; give a ticket: p2p-co2 doctor TICKET"


@dataclass(frozen=True)
class Finding:
    """``measured``: what is so, in words with units. ``advice``: one line, what to do about it."""

    name: str
    state: Grade
    measured: str
    advice: str = NOTHING_TO_DO


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What ``plan --link`` reads; None for what was not measured."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    round_trip_s: float | None = None


@dataclass
class NetworkLook:
    """What a look at the network found beside its findings. ``run``: the swarm's, None if nobody told.
    ``peers``: how many there are. ``is_reachable``: whether a seed could dial us; None if none was asked."""

    run: RunConfig | None = None
    peers: int = 0
    is_reachable: bool | None = None
    link: MeasuredLink = MeasuredLink()


@dataclass(frozen=True)
class Diagnosis:
    """``asked``: whether a ticket was given."""

    findings: Sequence[Finding]
    outcome: NetworkLook
    asked: bool

    @property
    def exit_status(self) -> int:
        """0: all well; 1: works with limits, or nobody knows; 2: cannot work."""
        states = {finding.state for finding in self.findings}
        if Grade.CANNOT in states:
            return 2
        is_unsure = self.asked and (Grade.UNKNOWN in states or not self.outcome.is_reachable)
        return int(Grade.LIMITED in states or is_unsure)

    @property
    def role(self) -> PeerRole:
        if self.exit_status == 2:
            return PeerRole.NONE
        if not self.asked:
            return PeerRole.UNKNOWN
        return PeerRole.DIRECT if self.outcome.is_reachable else PeerRole.DIAL_OUT

    def table(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "role": self.role.name.lower(),
            "exit_status": self.exit_status,
            "link": asdict(self.outcome.link),
        }


def line_of(finding: Finding) -> str:
    """A finding for a reader: one line, and a second one with the advice if there is something to do."""
    text = f"{finding.state:<8} {finding.name:<16} {_plain(finding.measured)}"
    is_all = finding.state == Grade.OK or finding.advice == NOTHING_TO_DO
    return text if is_all else f"{text}\n{'':8} {'':16} -> {_plain(finding.advice)}"


def _plain(text: str) -> str:
    """What a peer or a name server may have had a hand in, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)
