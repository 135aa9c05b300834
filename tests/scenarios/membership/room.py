"""The membership machine of one peer, in virtual time, and what others say to it.

Commands say what happened (``b joined``), and whom it tells its status, or asks for theirs. ``wait`` says
when, in seconds since the scenario began.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from google.protobuf.message import Message

from p2p_co2.protocol.membership import Left, Membership, NewPeer, positions
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Leave, Ping, Pong, Status

START = 100.0


class Room:
    def __init__(self) -> None:
        self.now = START
        self.machine = Membership(PeerId("me"))

    def rests(self, beat_s: str) -> list[str]:
        """Rounds are long, and it only trains: it beats so slowly."""
        self.machine.quiet_s = float(beat_s)
        self.machine.set_rests(True, self.now)
        return self._news()

    def rests_no_more(self) -> list[str]:
        self.machine.set_rests(False, self.now)
        return self._news()

    def found(self, *peers: str) -> list[str]:
        """The DHT lists these."""
        self.machine.found([PeerId("me"), *map(PeerId, peers)], self.now)
        return self._news()

    def hear(self, kind: str, *peers: str, **fields: str) -> list[str]:
        """``ping``: a status; ``question``: one that is to be answered; ``answer``: to ours, which was sent
        ``ago`` seconds ago; ``leave``. Fields are those of ``Status``."""
        ago_s = float(fields.pop("ago", "0.1"))
        reason = fields.pop("reason", "stopped")
        status = Status(**{name: _value(value) for name, value in fields.items()})
        message: Any = {
            "ping": Ping(status=status), "question": Ping(nonce=1, sent_at=self.now, status=status),
            "answer": Pong(nonce=1, ping_sent_at=self.now - ago_s, status=status),
            "leave": Leave(reason=reason.replace("_", " ")),
        }[kind]  # fmt: skip
        for peer in peers:
            self.machine.receive(message, PeerId(peer), self.now)
        return self._news()

    def unreachable(self, *peers: str) -> list[str]:
        for peer in peers:
            self.machine.unreachable(PeerId(peer), "no answer", self.now)
        return self._news()

    def link_broke(self, peer: str) -> list[str]:
        self.machine.link_broke(PeerId(peer))
        return self._news()

    def link_opened(self, peer: str) -> list[str]:
        self.machine.link_opened(PeerId(peer), self.now)
        return self._news()

    def announce(self, version: str = "1") -> list[str]:
        self.machine.status = Status(versions=[int(version)])
        self.machine.announce(self.now)
        return self._news()

    def say_goodbye(self) -> list[str]:
        self.machine.say_goodbye("stopped")
        return self._news()

    def wait(self, seconds: str) -> list[str]:
        """What it does meanwhile, and when."""
        end = self.now + float(seconds)
        moments: list[tuple[str, float]] = []
        while (at := self.machine.get_timer()) is not None and at <= end:
            self.now = max(self.now, at)
            self.machine.handle_timer(self.now)
            moments += [(words, self.now - START) for words in self._news()]
        self.now = end
        lines = []
        for words, group in groupby(moments, key=lambda moment: moment[0]):
            times = [at for _, at in group]
            until = f" to {times[-1]:.2f}" if len(times) > 1 else ""
            lines.append(f"{times[0]:.2f}{until}: {words}" + (f", {len(times)} times" if until else ""))
        return lines

    # ---- what it knows

    def live(self) -> str:
        known = sorted(self.machine.live.items())
        return " ".join(f"{peer}{' (missed)' * info.is_missed}" for peer, info in known) or "nobody"

    def is_cut_off(self) -> str:
        return "yes" if self.machine.departed.is_cut_off(len(self.machine.live), self.now) else "no"

    def awaited(self) -> str:
        return f"{self.machine.awaited} of {len(self.machine.candidates.next_at)} listed"

    def restarted(self) -> str:
        return " ".join(sorted(self.machine.take_restarted())) or "nobody"

    def positions(self, rounds_per_s: str) -> str:
        found = positions(self.machine.live.values(), self.now, float(rounds_per_s))
        return ", ".join(f"{one:.2f}" for one in found)

    # ---- inside

    def _news(self) -> list[str]:
        happened: dict[str, list[str]] = {}
        while (event := self.machine.next_event()) is not None:
            match event:
                case NewPeer():
                    happened.setdefault("{} joined", []).append(event.peer)
                case Left():
                    happened.setdefault(f"{{}} gone: {event.reason}", []).append(event.peer)
        for to, message in self.machine.messages_to_send():
            happened.setdefault(f"{_verb(message)} {{}}", []).append(to)
        return [words.format(" ".join(peers)) for words, peers in happened.items()]


def _verb(message: Message) -> str:
    match message:
        case Ping():
            return "asks" if message.nonce else "tells"
        case Pong():
            return "answers"
    return "says goodbye to"


def _value(text: str) -> Any:
    return Status.Phase.Value(text.upper()) if text.isalpha() else float(text) if "." in text else int(text)
