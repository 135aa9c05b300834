"""What was found, and what it means for taking part.

The exit status and the role follow from the findings alone: 2 if one of them forbids taking part, 1 if one
limits it or, once a swarm was asked, is not known, else 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

FULL, LIMITED, CANNOT = 0, 1, 2
"""Exit statuses."""
NOTHING_TO_DO = "nothing to do"


class State(StrEnum):
    """``limited``: works, with less. ``cannot``: does not work at all."""

    OK = "ok"
    LIMITED = "limited"
    CANNOT = "cannot"
    UNKNOWN = "unknown"


class Role(StrEnum):
    """How this peer will meet the others."""

    DIRECT = "direct: others can dial this peer"
    DIAL_OUT = "dial-out only: this peer dials others, or meets them through a relay"
    NONE = "none: this machine cannot take part as it is"
    UNKNOWN = "unknown: no swarm was asked; give a ticket: p2p-co2 doctor TICKET"


@dataclass(frozen=True)
class Finding:
    """``measured``: what is so, in words with units. ``advice``: one line, what to do about it."""

    name: str
    state: State
    measured: str
    advice: str = NOTHING_TO_DO


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What ``plan --link`` reads; None for what was not measured."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """``is_reachable``: whether a seed could dial us; None if none was asked. ``asked``: whether a ticket was
    given."""

    findings: tuple[Finding, ...]
    is_reachable: bool | None
    asked: bool
    link: MeasuredLink = MeasuredLink()

    @property
    def exit_status(self) -> int:
        states = {finding.state for finding in self.findings}
        if State.CANNOT in states:
            return CANNOT
        is_unsure = self.asked and (State.UNKNOWN in states or not self.is_reachable)
        return LIMITED if State.LIMITED in states or is_unsure else FULL

    @property
    def role(self) -> Role:
        if self.exit_status == CANNOT:
            return Role.NONE
        if not self.asked:
            return Role.UNKNOWN
        return Role.DIRECT if self.is_reachable else Role.DIAL_OUT

    def table(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "role": self.role.name.lower(),
            "exit_status": self.exit_status,
            "link": asdict(self.link),
        }


def line_of(finding: Finding) -> str:
    """A finding for a reader: one line, and a second one with the advice if there is something to do."""
    text = f"{finding.state:<8} {finding.name:<16} {_plain(finding.measured)}"
    is_all = finding.state == State.OK or finding.advice == NOTHING_TO_DO
    return text if is_all else f"{text}\n{'':8} {'':16} -> {_plain(finding.advice)}"


def _plain(text: str) -> str:
    """What a peer or a name server may have had a hand in, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)
