"""``p2p-co2 doctor``: can this machine take part, how, and what would make it better, before anything is
downloaded.

``machine`` looks at this machine alone, which ``join`` does too, and at what the run asks of it. ``network``
looks at the way to the swarm and at how others see us. In under 30 s, some megabytes each way. Nothing of the
run is downloaded but its settings; what could not be found out is "unknown", never "ok"."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from p2p_co2.config import PeerConfig
from p2p_co2.ticket import Ticket
from peers.doctor.findings import Diagnosis, Finding, Grade, NetworkLook, line_of
from peers.doctor.machine import look_at_machine, look_at_needs


def run_doctor(
    config: PeerConfig, ticket_text: str, as_json: bool, say: Callable[[str], None] = print
) -> int:
    """Say each finding as it comes; returns 0 (all well), 1 (works with limits) or 2 (cannot work).

    ``config``: as the peer is to be started with. ``ticket_text``: of the run to look at, "" for this machine
    alone. Raises ``TicketError``."""
    ticket = Ticket.parse(ticket_text) if ticket_text else None
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            say(line_of(finding))

    for finding in look_at_machine(config):
        tell(finding)
    outcome = NetworkLook()
    if not any(f.name in {"torch", "platform"} and f.state == Grade.CANNOT for f in findings):
        from peers.doctor.network import look_at_network

        outcome = asyncio.run(look_at_network(ticket, config, tell))
        if outcome.run is not None:
            for finding in look_at_needs(outcome.run, config, outcome.peers, outcome.link):
                tell(finding)
    diagnosis = Diagnosis(findings, outcome, asked=ticket is not None)
    say(json.dumps(diagnosis.table(), indent=2) if as_json else f"role: {diagnosis.role}")
    return diagnosis.exit_status
