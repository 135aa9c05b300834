"""The exception tree. Its branches are what the caller can do about it.

    P2PCo2Error
    ├── ConfigError            your input: the message says which file, which key, and what would be right
    ├── TicketError            a wrong or foreign invitation: ask the organiser for a new one
    │   └── RunOver            the run has had its last round
    ├── EnvironmentFault       this machine: port in use, disk full, no permission; the message has the fix
    ├── RemoteProtocolError    a peer broke the rules: drop the message, count it against the peer
    ├── LocalProtocolError     we broke the rules: a bug here, crash loudly
    ├── TransportError         the world did it: back off and retry
    │   └── PeerLost           the link to one peer is gone
    └── DigestMismatch         bytes from a donor are not what was agreed: quarantine the donor

An aborted round is not an error: it is an event with a reason (``telemetry.events.RoundAborted``).
"""

from __future__ import annotations


class P2PCo2Error(Exception):
    """Root of everything this library raises on purpose."""


class ConfigError(P2PCo2Error):
    """The user's input is wrong. ``where`` is the file (or "command line"), ``key`` the dotted key,
    ``problem`` what is wrong and what would be right."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        self.where, self.key, self.problem = where, key, problem
        super().__init__(f"{where}: {key}: {problem}" if key else f"{where}: {problem}")

    @classmethod
    def of_option(cls, option: str, problem: str) -> ConfigError:
        """What is wrong with an option such as ``--peers``."""
        return cls("command line", option, problem)


class TicketError(P2PCo2Error):
    """The ticket is damaged, of another version, or for another run."""


RUN_OVER = 3
"""Exit status of ``p2p-co2 join`` for ``RunOver``."""


class RunOver(TicketError):
    """The run has had its last round, and nobody of it is left."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        super().__init__(f"this run ended at round {rounds}; ask for a newer ticket")


class EnvironmentFault(P2PCo2Error):
    """This machine refuses: the message names the cause and the fix."""


class RemoteProtocolError(P2PCo2Error):
    """A peer sent what the protocol forbids. ``reason`` is a short constant, counted per sender."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class LocalProtocolError(P2PCo2Error):
    """Our own code called a machine in a state that forbids it. A bug, never caught."""


class TransportError(P2PCo2Error):
    """The network failed; retrying may help."""


class PeerLost(TransportError):
    """The link to a peer is gone."""


class DigestMismatch(P2PCo2Error):
    """Content from a donor does not have the digest that was agreed."""
