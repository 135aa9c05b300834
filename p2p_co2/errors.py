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

An aborted fragment exchange is not an error: it is an event with a reason
(``telemetry.events.RoundAborted``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, StrEnum, auto


class P2PCo2Error(Exception):
    """Root of everything this library raises on purpose."""


class ConfigError(P2PCo2Error):
    """The user's input is wrong. ``where`` is the file (or "command line"), ``key`` the dotted key,
    ``problem`` what is wrong and what would be right. ``line``: of the file, 0 if it is not known. Of several
    mistakes at once it is the first, and its text has a line for each."""

    def __init__(self, where: str, key: str, problem: str, line: int = 0) -> None:
        self.where = where
        self.key = key
        self.problem = problem
        place = f"{where}, line {line}" if line else where
        super().__init__(f"{place}: {key}: {problem}" if key else f"{place}: {problem}")

    @classmethod
    def of_all(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """All of ``errors``, of which there is at least one, as one to raise."""
        first = cls(errors[0].where, errors[0].key, errors[0].problem)
        first.args = ("\n".join(str(error) for error in errors),)
        return first

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


class Blame(Enum):
    """How much an offence says against its sender."""

    GRAVE = auto()
    """There is no innocent explanation, such as a race or a restart."""
    OTHERS = auto()
    """An honest peer may meet it with each piece of a payload: we were started anew, a stranger took the room
    for what comes early, or the coordinator told us another BEGIN than the sender."""
    USUAL = auto()


class Offence(StrEnum):
    """The reasons of ``RemoteProtocolError`` that code acts upon: by their ``blame``, or one by one."""

    blame: Blame

    def __new__(cls, words: str, blame: Blame) -> Offence:
        offence = str.__new__(cls, words)
        offence._value_ = words
        offence.blame = blame
        return offence

    UNREADABLE = "unreadable", Blame.GRAVE
    UNKNOWN_MESSAGE = "unknown message", Blame.GRAVE
    TOO_LARGE = "too large", Blame.GRAVE
    WRONG_MESSAGE_SIZE = "wrong message size", Blame.GRAVE
    BAD_STATUS = "bad status", Blame.GRAVE
    UNKNOWN_FRAGMENT = "unknown fragment", Blame.GRAVE
    WRONG_SIGNATURE = "wrong signature", Blame.GRAVE
    WRONG_DIGEST_LENGTH = "wrong digest length", Blame.GRAVE
    WRONG_ATTEMPT_LENGTH = "wrong attempt length", Blame.GRAVE
    WRONG_ATTEMPT = "wrong attempt", Blame.GRAVE
    BAD_PEER_ID = "bad peer id", Blame.GRAVE
    NO_MEMBER = "no member", Blame.USUAL
    IMPOSSIBLE_WEIGHT = "impossible weight", Blame.GRAVE
    IMPOSSIBLE_RATE = "impossible rate", Blame.GRAVE
    IMPOSSIBLE_DURATION = "impossible duration", Blame.GRAVE
    PADDED = "padded", Blame.GRAVE

    UNKNOWN_ROUND = "unknown round", Blame.OTHERS
    REPLAYED_ROUND = "replayed round", Blame.OTHERS
    UNKNOWN_PEER = "unknown peer", Blame.OTHERS
    TOO_MUCH_HELD = "too much held", Blame.OTHERS
    WRONG_SIZE = "wrong size", Blame.OTHERS
    WRONG_PIECE = "wrong piece", Blame.OTHERS
    WRONG_OWNER = "wrong owner", Blame.OTHERS
    WRONG_PARTS = "wrong parts", Blame.OTHERS
    WRONG_GENERATION = "wrong generation", Blame.OTHERS
    NOT_A_MEMBER = "not a member", Blame.OTHERS

    TOO_SLOW = "too slow", Blame.USUAL
    TOO_MANY_MESSAGES = "too many messages", Blame.USUAL
    SHUT_OUT = "shut out", Blame.USUAL
    OTHER_GROUP = "other group", Blame.USUAL
    """Its sender has moved, and nobody is to blame."""
    OTHER_HISTORY = "other history", Blame.USUAL
    """Nobody is to blame: it may be this peer that went astray."""


_BLAMES: dict[str, Blame] = {offence: offence.blame for offence in Offence}


def blame_of(reason: str) -> Blame:
    """Of any reason of a ``RemoteProtocolError``."""
    return _BLAMES.get(reason, Blame.USUAL)


class RemoteProtocolError(P2PCo2Error):
    """A peer sent what the protocol forbids. ``reason`` is a short constant, counted per sender: an
    ``Offence``, or a text that nothing acts upon."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class LocalProtocolError(P2PCo2Error):
    """Our own code called a machine in a state that forbids it. A bug, never caught."""


class TransportError(P2PCo2Error):
    """The network failed; retrying may help."""


class PeerLost(TransportError):
    """The link to a peer is gone."""


class DigestMismatch(P2PCo2Error):
    """Content from a donor does not have the digest that was agreed."""


_WORDS = (
    (r"Input should be a valid integer.*", "write a whole number"),
    (r"Input should be a valid number.*", "write a number"),
    (r"Input should be a finite number.*", "write a finite number"),
    (r"Input should be a valid boolean.*", "write true or false"),
    (r"Input should be a valid string.*", "write text"),
    (r"Input should be a valid (?:dictionary|instance).*", "is a table of settings; write it as one"),
    (r"Input (?:should be|is not) a valid path.*", "write a path"),
    (r"Input should be greater than or equal to (.+)", r"at least \1"),
    (r"Input should be greater than (.+)", r"greater than \1"),
    (r"Input should be less than or equal to (.+)", r"at most \1"),
    (r"Input should be less than (.+)", r"less than \1"),
    (r"Input should be ('.+)", r"use \1"),
    (r"(?:String|Value|Data) should have at least (\d+) (characters?|items?).*", r"at least \1 \2"),
    (r"(?:String|Value|Data) should have at most (\d+) (characters?|items?).*", r"at most \1 \2"),
    (r"String should match pattern .*A-Za-z0-9\._-.*", "use letters, digits, dots, - and _ alone"),
    (r"String should match pattern .*\[0-9a-f\]\{64\}.*", "write 64 hexadecimal digits, or nothing"),
    (r"String should match pattern (.+)", r"must match \1"),
    (r"Field required", "is missing"),
    (r"Extra inputs are not permitted", "unknown key; remove it or check its spelling and its table"),
    (r"Value error, (.*)", r"\1"),
)


def in_our_words(message: str) -> str:
    """What pydantic says of a bad value, as we say it: what would be right. Other text stays as it is."""
    for theirs, ours in _WORDS:
        if found := re.fullmatch(theirs, message, re.DOTALL):
            return found.expand(ours)
    return message
