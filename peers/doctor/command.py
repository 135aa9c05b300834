"""Options in, findings out: looks, says each finding as it comes, ends with role and status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from p2p_co2.config import PeerConfig
from p2p_co2.ticket import Ticket
from peers.doctor.findings import Diagnosis, Finding, MeasuredLink, State, line_of
from peers.doctor.machine import look_at_machine


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """``ticket``: of the run to look at, "" for this machine alone. ``config``: as the peer is to be started
    with."""

    config: PeerConfig
    ticket: str = ""
    as_json: bool = False


def run_doctor(options: DoctorOptions, say: Callable[[str], None] = print) -> int:
    """Look at everything; returns 0 (all well), 1 (works with limits) or 2 (cannot work). Raises
    ``TicketError``."""
    ticket = Ticket.parse(options.ticket) if options.ticket else None

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if not options.as_json:
            say(line_of(finding))

    findings: list[Finding] = []
    for finding in look_at_machine(options.config):
        tell(finding)
    diagnosis = _diagnosed(ticket, options.config, findings, tell)
    if options.as_json:
        say(json.dumps(diagnosis.table(), indent=2))
    else:
        say(f"role: {diagnosis.role}")
    return diagnosis.exit_status


def _diagnosed(
    ticket: Ticket | None, config: PeerConfig, findings: list[Finding], tell: Callable[[Finding], None]
) -> Diagnosis:
    is_reachable, link = None, MeasuredLink()
    if not any(
        finding.name in {"torch", "platform"} and finding.state == State.CANNOT for finding in findings
    ):
        from peers.doctor.needs import look_at_needs
        from peers.doctor.network import look_at_network, look_without_ticket

        if ticket is None:
            asyncio.run(look_without_ticket(config, tell))
        else:
            outcome = asyncio.run(look_at_network(ticket, config, tell))
            is_reachable, link = outcome.is_reachable, outcome.link
            if outcome.run is not None:
                for finding in look_at_needs(outcome.run, config, outcome.peers, link):
                    tell(finding)
    return Diagnosis(findings=tuple(findings), is_reachable=is_reachable, asked=ticket is not None, link=link)
