"""The pipeline machine of one peer of stage 1 of 3, in virtual time, with a neighbour on each side.

``before`` and ``behind`` have said who they are, and ``behind`` has room for three. Microbatches are called
by their number. ``work`` says what the training thread would do next, and begins it.
"""

from __future__ import annotations

from typing import Any

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.pipeline import DroppedMicrobatch, Key, Pipeline, Place, Sizes, UselessPayload
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.protocol.pipeline.neighbours import MAX_NEIGHBOURS
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import kind_of
from p2p_co2.wire.messages_pb2 import Backward, Declined, Dropped, Forward, MicrobatchKey, Neighbour

OWNER = 1
SIZES = {"forward": "1000", "backward": "1000,500"}


class Room:
    def __init__(self) -> None:
        self.now = 1.0
        self.sizes(**SIZES)

    def sizes(self, forward: str, backward: str) -> list[str]:
        """Of what crosses, in bytes: a forward, and a gradient in each codec. The peer begins anew."""
        codecs = [_bytes(one) for one in backward.split(",")]
        sizes = Sizes(8, 4, 8, _bytes(forward), codecs, b"b", 60.0)
        self.machine = Pipeline(Place(PeerId("me"), 77, 1, 3), sizes)
        self._forward_bytes = _bytes(forward)
        self.join("before", "0")
        self.join("behind", "2")
        self.neighbour("before", "0")
        self.neighbour("behind", "2", granted="3")
        return []

    # ---- others

    def join(self, peer: str, stage: str) -> list[str]:
        """Its record says that it is in this stage, and it is live."""
        self.machine.join(PeerId(peer), int(stage))
        return self._said()

    def lose(self, peer: str) -> list[str]:
        self.machine.lose(PeerId(peer))
        return self._said()

    def crowd(self, count: str) -> str:
        """So many join on each side."""
        for number in range(2 * int(count)):
            self.machine.join(PeerId(f"more {number}"), 2 * (number % 2))
        now, _ = self.machine.held()["MAX_NEIGHBOURS"]
        self._said()
        return f"{now / MAX_NEIGHBOURS:.0f} times MAX_NEIGHBOURS"

    def neighbour(
        self, peer: str, stage: str, meeting: str = "5", boundaries: str = "b", rate: str = "1",
        granted: str = "0",
    ) -> list[str]:  # fmt: skip
        """It says who it is, and for how many it has room."""
        said = Neighbour(stage=int(stage), meeting=int(meeting), boundaries=boundaries.encode())
        said.tokens_per_s = float(rate)
        said.granted = int(granted)
        return self._take(said, peer)

    def forward(
        self, number: str, peer: str = "before", at: str = "0", size: str = "", total: str = ""
    ) -> list[str]:
        total_bytes = _bytes(total) if total else self._forward_bytes
        data = bytes(_bytes(size) if size else total_bytes)
        key = MicrobatchKey(owner=OWNER, number=int(number))
        return self._take(Forward(key=key, offset=_bytes(at), total=total_bytes, data=data), peer)

    def forwards(self, first: str, last: str) -> list[str]:
        """Several, whole."""
        said = [self.forward(str(number)) for number in range(int(first), int(last) + 1)]
        return [f"{sum('taken' in one for one in said)} taken", *_declined(said)]

    def backward(
        self, number: str, peer: str = "behind", tokens: str = "100", loss: str = "1", codec: str = "0",
        at: str = "0", size: str = "1000", total: str = "",
    ) -> list[str]:  # fmt: skip
        said = Backward(
            key=MicrobatchKey(owner=OWNER, number=int(number)), tokens=int(tokens), loss=float(loss),
            offset=_bytes(at), total=_bytes(total or size), data=bytes(_bytes(size)), codec=int(codec),
        )  # fmt: skip
        return self._take(said, peer)

    def declined(self, number: str, peer: str = "behind") -> list[str]:
        return self._take(
            Declined(key=MicrobatchKey(owner=OWNER, number=int(number)), reason="no room"), peer
        )

    def dropped(self, number: str, peer: str = "before") -> list[str]:
        return self._take(Dropped(key=MicrobatchKey(owner=OWNER, number=int(number))), peer)

    # ---- the training thread

    def work(self) -> list[str]:
        work = self.machine.next_work(self.now)
        if work is None:
            return [f"nothing: {self.machine.waits_for}"]
        if work.do is Do.STEP or work.key is None:
            return ["step"]
        size = len(memoryview(work.payload or b""))
        codec = f" in codec {work.codec}" if work.do is Do.BACKWARD else ""
        return [f"{work.do.name.lower()} {work.key.number} of {work.sender}: {size} bytes{codec}"]

    def forwarded(self, number: str) -> list[str]:
        self.machine.forwarded(Key(OWNER, int(number)), bytes(self._forward_bytes), 100, self.now)
        return self._said()

    def counted(self, number: str) -> list[str]:
        self.machine.counted(Key(OWNER, int(number)), bytes(1000), 100, 1.0, self.now)
        return self._said()

    def failed(self, number: str, reason: str) -> list[str]:
        self.machine.failed(Key(OWNER, int(number)), RemoteProtocolError(reason.replace("_", " ")))
        return self._said()

    def stepped(self) -> list[str]:
        self.machine.stepped()
        return self._said()

    def close(self) -> list[str]:
        self.machine.close(self.now)
        return self._said()

    # ---- time, and what it knows

    def wait(self, seconds: str) -> list[str]:
        """What it does meanwhile."""
        end = self.now + float(seconds)
        said = list[str]()
        while (at := self.machine.get_timer()) is not None and at <= end:
            self.now = max(self.now, at)
            self.machine.handle_timer(self.now)
            said += [f"{self.now:.2f}: {line}" for line in self._said()]
        self.now = end
        return said

    def state(self) -> str:
        machine = self.machine
        timer = machine.get_timer()
        over = ", over" if machine.is_over else ""
        until = "none" if timer is None else f"{timer:.2f}"
        return f"{machine.in_flight} begun, {machine.waiting} waiting, timer {until}{over}"

    # ---- inside

    def _take(self, message: Any, peer: str) -> list[str]:
        taken = self.machine.receive(message, PeerId(peer), self.now)
        return ["taken" if taken else "no use", *self._said()]

    def _said(self) -> list[str]:
        lines = list[str]()
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, DroppedMicrobatch):
                lines.append(f"lets go of {event.key.number}: {event.reason}")
            elif isinstance(event, UselessPayload):
                lines.append(f"blames {event.sender} for {event.kind.__name__}: {event.error.reason}")
        for peer, message in self.machine.messages_to_send():
            match message:
                case Neighbour():
                    continue  # who it is, and its room
                case Declined() | Dropped():
                    reason = f": {message.reason}"
                case _:
                    reason = ""
            lines.append(f"-> {peer} {kind_of(message).name} {message.key.number}{reason}")
        return lines


def _declined(said: list[list[str]]) -> list[str]:
    lines = [line for one in said for line in one if "Declined" in line]
    return [f"{len(lines)} declined"] if lines else []


def _bytes(text: str) -> int:
    """``2u``: two of the units in which pieces are cut."""
    return int(text[:-1]) * PIECE_UNIT_BYTES if text.endswith("u") else int(text)
