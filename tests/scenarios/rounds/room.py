"""A swarm of rounds machines in virtual time, with peers a, b, c, ... in the order in which they coordinate
round 1 (``first=``: another round). Each message takes 20 ms, each average 10 ms; one fragment.

What lets time pass says what happened, alike at several peers in one line (``a b: aborted 1: ...``). A
committed round names those whose slices are in all parts of the mean. Every time all laws of
``Network.check_agreement`` are checked.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import events as said
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.certificates import signed_mean
from tests.round_network import RUN, Faults, Network, contributors_of

START = hashlib.sha256(b"start").digest()
DIGESTS = {"start": START, "other": hashlib.sha256(b"another state").digest()}
KINDS = {
    "READY": wire.Ready, "WAITING": wire.Waiting, "BEGIN": wire.Begin, "PART": wire.Part, "MEAN": wire.Mean,
    "RESULT": wire.Result, "DECISION": wire.Decision, "ASK_OUTCOME": wire.AskOutcome, "BEHIND": wire.Behind,
}  # fmt: skip
NAME_OF = {kind: name for name, kind in KINDS.items()}
QUIET = said.ReduceWanted | said.CheckWanted | said.Stale
"""Events that are no news to a reader."""


class SeenNetwork(Network):
    """A network in which each peer may see the others as the scenario says."""

    def __init__(self, count: int, shape: said.PayloadShape) -> None:
        self.seen: dict[PeerId, dict[str, Any]] = {}
        self.seen_by: dict[PeerId, dict[PeerId, dict[str, Any]]] = {}
        self.silent: set[PeerId] = set()
        self.hidden: dict[PeerId, set[PeerId]] = {}
        """By who does not see them."""
        super().__init__(count, faults=Faults(latency_s=(0.02, 0.02)), shape=shape)

    def tell_everybody(self) -> None:
        there = [name for name in self.names if self.peers[name].alive or name in self.silent]
        for me in there:
            if self.peers[me].alive:
                shown = [name for name in there if name not in self.hidden.get(me, ())]
                self.peers[me].machine.set_peers({name: self._seen(me, name) for name in shown}, self.now)
                self.pump(me)

    def _seen(self, me: PeerId, name: PeerId) -> said.PeerView:
        told = vars(self._view(name)) | self.seen.get(name, {}) | self.seen_by.get(me, {}).get(name, {})
        return said.PeerView(**told)


class Room:
    def __init__(self) -> None:
        self.rules: list[tuple[str, str, str, float]] = []
        """(kind, from, to, seconds that it comes later: inf if never), the newest first; "" is any."""
        self.weights: dict[str, float] = {}
        self.first_offer_at: dict[int, float] = {}
        self.hostile: set[str] = set()
        self.begun: wire.Begin | None = None
        """The newest BEGIN that was made by hand."""
        self.within_s: float | None = None
        self.lost_at: set[tuple[str, str]] = set()
        self.lying: dict[str, tuple[str, str]] = {}
        self.told = self.refused = self.listed = 0

    # ---- what there is

    def swarm(self, *labels: str, first: str = "1", blocks: str = "16", **shape: str) -> None:
        """``shape``: numbers of ``PayloadShape``."""
        numbers: dict[str, Any] = {name: float(value) for name, value in shape.items()}
        self.net = SeenNetwork(len(labels), said.PayloadShape(8, (int(blocks),), **numbers))
        order = coordination_order(self.net.names, 0, int(first))
        self.peers = dict(zip(labels, order, strict=True))
        self.label_of = {peer: label for label, peer in self.peers.items()}
        self.net.on_send = self._passes
        self.net.on_reduce = self._reduces
        self.net.finds_itself = self._finds_itself
        self.net.weight = lambda name: self.weights.get(self.label_of[name], 1.0)  # type: ignore[method-assign]

    def silent(self, *labels: str) -> None:
        """They are seen, and say and hear nothing."""
        for peer in self._peers(labels):
            self.net.silent.add(peer)
            self.net.peers[peer].alive = False

    def at(self, *labels: str, version: str, digest: str = "start") -> list[str]:
        """The state that peers hold, which all others hear of."""
        for peer in self._peers(labels):
            self.net.set_state(peer, 0, int(version), DIGESTS[digest])
        return self._tell()

    def wake(self, *labels: str, to: str) -> list[str]:
        """Silent ones come to life, with the state of another."""
        for peer in self._peers(labels):
            self.net.silent.discard(peer)
            self.net.peers[peer].alive = True
            self.net.set_state(peer, 0, *self.net.peers[self.peers[to]].states[0])
        return self._tell()

    def seen(self, *labels: str, by: str = "", **view: str) -> list[str]:
        """Peers are seen so, by all or by one: fields of ``PeerView``; ``finished=yes``: with the
        fragment."""
        changed = {name: _of_view(name, value) for name, value in view.items()}
        seen = self.net.seen_by.setdefault(self.peers[by], {}) if by else self.net.seen
        for peer in self._peers(labels):
            seen[peer] = seen.get(peer, {}) | changed
        return self._tell()

    def hidden(self, *labels: str, by: str) -> list[str]:
        """These do not see them, and see all others."""
        for me in by:
            self.net.hidden[self.peers[me]] = set(self._peers(labels))
        return self._tell()

    def heartbeats(self) -> list[str]:
        """All hear how all others are."""
        return self._tell()

    def weight(self, **weights: str) -> None:
        self.weights |= {label: float(value) for label, value in weights.items()}

    def line(self, **rates: str) -> list[str]:
        """Upload rates, bytes per second."""
        self.net.uploads |= {self.peers[label]: float(rate) for label, rate in rates.items()}
        return self._tell()

    def slices_are_hostile(self, *labels: str) -> None:
        """The tensor side finds them so."""
        self.hostile = set(labels)

    def does_not_find_itself(self, *labels: str, at: str) -> None:
        """Their slices are not in the means of these owners, as they find."""
        self.lost_at = {(label, owner) for label in labels for owner in at}

    def lies(self, liar: str, how: str, to: str = "") -> None:
        """An owner's means are other ones for ``each`` receiver, or for every second one (``halves``), and it
        signs all of them; or ``unsigned``: it signs the right one alone; or it signs none (``to``: for
        these)."""
        self.lying[liar] = how, to

    # ---- what the carriers do

    def lose(self, kind: str = "", by: str = "inf", **ways: str) -> None:
        """Messages of a kind (else of all), ``from`` these peers, ``to`` those (else of all)."""
        self.rules.insert(0, (kind, ways.get("from", ""), ways.get("to", ""), float(by)))

    delay = lose
    """The same come so many seconds later."""

    def begins_within(self, seconds: str) -> None:
        """BEGIN allows the others so much time."""
        self.within_s = float(seconds)

    def deliver(self) -> None:
        """All messages come through again."""
        self.rules = []

    def _passes(self, source: PeerId, to: PeerId, message: Message) -> bool:
        kind, sender, receiver = NAME_OF[message.__class__], self.label_of[source], self.label_of.get(to, "?")
        if isinstance(message, wire.Begin) and self.within_s is not None:
            message.parts_within_s = message.result_within_s = self.within_s
        if isinstance(message, wire.Mean) and sender in self.lying:
            self._lie(source, to, wire.Mean.FromString(message.SerializeToString()))
            return False
        later_s = next(
            (
                later_s
                for of, senders, receivers, later_s in self.rules
                if of in ("", kind) and sender in (senders or sender) and receiver in (receivers or receiver)
            ),
            0.0,
        )
        if 0 < later_s < math.inf:
            self.net.at(self.net.now + later_s, lambda: self.net.deliver(source, to, message))
        return later_s == 0

    def _reduces(self, peer: PeerId, job: said.ReduceJob) -> bool:
        bad = next((one.peer for one in job.slices if self.label_of[one.peer] in self.hostile), None)
        if bad is not None:
            self.net.peers[peer].machine.refused_slice(job, bad, "not finite", self.net.now)
            self.net.at(self.net.now, lambda: self.net.pump(peer))
        return bad is None

    def _finds_itself(self, peer: PeerId, job: said.CheckWanted) -> bool:
        return (self.label_of[peer], self.label_of[self._spec(job.key, job.part).owner]) not in self.lost_at

    def _spec(self, attempt: bytes, part: int) -> Any:
        sent = (m for _, _, m in self.net.sent if isinstance(m, wire.Begin))
        return next(begin for begin in sent if begin.key.attempt == attempt).parts[part]

    def _lie(self, source: PeerId, to: PeerId, mean: wire.Mean) -> None:
        how, victims = self.lying[self.label_of[source]]
        number = self.net.names.index(to)
        if how != "unsigned" or not victims:
            mean.data = bytes([number % 2 if how == "halves" else number]) * len(mean.data)
        if how != "unsigned":
            spec = self._spec(mean.key.attempt, mean.part)
            blocks = spec.start_block, spec.stop_block
            mean.signature = signed_mean(mean, blocks, self.net.peers[source].identity, RUN).signature
        elif self.label_of[to] in victims:
            mean.signature = bytes(64)
        self.net.at(self.net.now + 0.02, lambda: self.net.deliver(source, to, mean))

    # ---- what peers do

    def offer(self, *labels: str, round: str = "1", last: str = "") -> list[str]:
        """In this order, at once; ``all``: all that live and are at the version before."""
        self.first_offer_at.setdefault(int(round), self.net.now)
        ready = [peer for peer in self.net.peers.values() if peer.alive and peer.version == int(round) - 1]
        ready.sort(key=lambda peer: self.label_of[peer.name])
        for peer in [one.name for one in ready] if labels == ("all",) else self._peers(labels):
            self.net.offer(peer, int(round), is_last=bool(last))
        return self._news()

    def play(self, first: str, last: str, seconds: str = "30") -> list[str]:
        """Rounds that all who live offer for, each within so many seconds."""
        lines = []
        for round_ in range(int(first), int(last) + 1):
            lines += self.offer("all", round=str(round_)) + self.run(seconds)
        return lines

    def withdraw(self, label: str, *reason: str) -> list[str]:
        peer = self.peers[label]
        assert self.net.peers[peer].machine.withdraw(0, " ".join(reason), self.net.now)
        self.net.pump(peer)
        return self._news()

    def crash(self, *labels: str) -> list[str]:
        """The others see it after 3 s."""
        for peer in self._peers(labels):
            self.net.crash(peer)
        return self._news()

    def run(self, seconds: str = "30") -> list[str]:
        self.net.run(float(seconds))
        return self._news()

    def hear(self, label: str, kind: str, **fields: str) -> list[str]:
        """A message that is made by hand, ``from`` one or several. It is as an honest one but for ``fields``,
        by their paths; what follows at the peer, and what it sends then, are said."""
        senders = fields.pop("from")
        peer = self.net.peers[self.peers[label]]
        message = self._made(label, kind, fields)
        if isinstance(message, wire.Begin) and not any(path.startswith("key.") for path in fields):
            seal_begin(message, self.peers[senders])
        self.listed = len(self.net.sent)
        if isinstance(message, wire.Ready):
            self.first_offer_at.setdefault(message.round, self.net.now)
        for sender in senders if set(senders) <= self.peers.keys() else [senders]:
            try:
                peer.machine.receive(message, self._peer(sender), self.net.now)
            finally:
                self.net.pump(peer.name)
        self.begun = message if isinstance(message, wire.Begin) else self.begun
        return [*self._news(), *self.sent()]

    def hear_each(self, label: str, kind: str, **cases: str) -> list[str]:
        """One message for each value of each field, as in ``hear``: what becomes of it."""
        lines = []
        sender = cases.pop("from")
        for path, values in cases.items():
            for value in values.split() or [""]:
                try:
                    said = self.hear(label, kind, **{"from": sender, path: value})
                except RemoteProtocolError as error:
                    said = [f"refused: {error.reason}"]
                lines.append(f"{path}={value}  {', '.join(said) or 'taken'}")
        return lines

    def flood(self, label: str, rounds: str, **ways: str) -> str:
        """READYs of so many rounds ``from`` one peer: what is held of them."""
        machine = self.net.peers[self.peers[label]].machine
        for round_ in range(1, int(rounds) + 1):
            ready = wire.Ready(round=round_, state_digest=START, weight=1.0, offer_id=bytes(8))
            machine.receive(ready, self.peers[ways["from"]], self.net.now)
            machine.messages_to_send()
        return f"{machine.held()['GATHERINGS'][0]} gathering held"

    def note_begin(self) -> None:
        """BEGIN as it would be now is the one that is heard from now on."""
        self.begun = self._begin()

    # ---- what is said

    def sent(self, *kinds: str) -> list[str]:
        """What was sent since it was asked last, of these kinds."""
        lines: dict[str, Counter[str]] = {}
        for source, to, message in self.net.sent[self.listed :]:
            name = NAME_OF[message.__class__]
            if not kinds or name in kinds:
                words = f"{self.label_of[source]} -> {{}}: {name}{self._remark(message)}"
                lines.setdefault(words, Counter())[self.label_of.get(to, "?")] += 1
        self.listed = len(self.net.sent)
        return [
            words.format(" ".join(f"{one}*{n}" if n > 1 else one for one, n in sorted(to.items())))
            for words, to in lines.items()
        ]

    def count_sent(self) -> str:
        """How many messages were sent since it was asked last, by kind."""
        kinds = [NAME_OF[message.__class__] for _, _, message in self.net.sent[self.listed :]]
        self.listed = len(self.net.sent)
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)

    def parts(self) -> list[str]:
        """Of the newest BEGIN: who averages how many blocks of whom."""
        begin = next(m for _, _, m in reversed(self.net.sent) if isinstance(m, wire.Begin))
        members = [member.peer for member in begin.members]
        lines = [f"slices within {begin.parts_within_s:.1f} s, all within {begin.result_within_s:.1f} s"]
        for part in begin.parts:
            bits = int.from_bytes(part.senders, "little") if part.senders else -1
            senders = [peer for index, peer in enumerate(members) if bits >> index & 1]
            size = part.stop_block - part.start_block
            lines.append(f"{self.label_of[part.owner]} averages {size} blocks of {self._labels(senders)}")
        return [lines[0], *sorted(lines[1:])]

    def timer(self, label: str) -> str:
        """When a peer does something next."""
        at = self.net.peers[self.peers[label]].machine.get_timer()
        return "never" if at is None else f"in {at - self.net.now:.1f} s"

    def stage(self, label: str) -> str:
        return self.net.peers[self.peers[label]].machine.stage(0) or "no offer"

    def states(self) -> list[str]:
        """Who holds which version; the same letter behind it is the same state."""
        held: dict[tuple[int, bytes], list[PeerId]] = {}
        for peer in self.net.peers.values():
            if peer.alive:
                held.setdefault(peer.states[0], []).append(peer.name)
        of = sorted(held)
        return [
            f"{self._labels(held[state])}: version {state[0]}, state {of.index(state) + 1}" for state in of
        ]

    # ---- inside

    def _peer(self, label: str) -> PeerId:
        """A label's, or one that nobody has met."""
        return self.peers.get(label) or PeerId(label)

    def _peers(self, labels: Iterable[str]) -> list[PeerId]:
        return [self.peers[label] for label in labels]

    def _labels(self, peers: Iterable[str]) -> str:
        return " ".join(sorted(self.label_of.get(PeerId(peer), "?") for peer in peers)) or "nobody"

    def _tell(self) -> list[str]:
        self.net.tell_everybody()
        return self._news()

    def _plain(self, text: str) -> str:
        for peer, label in self.label_of.items():
            text = text.replace(peer, label).replace(peer[-6:], label)
        return text

    def _news(self) -> list[str]:
        for round_ in {event.round for _, event in self.net.events if isinstance(event, said.Committed)}:
            self.net.check_agreement(round_)
        lines: dict[str, list[PeerId]] = {}
        for peer, event in self.net.events[self.told :]:
            if not isinstance(event, QUIET):
                lines.setdefault(self._words(event), []).append(peer)
        for to, source, error in self.net.refused[self.refused :]:
            lines.setdefault(f"refuses {self.label_of[source]}: {error.reason}", []).append(to)
        self.told = len(self.net.events)
        self.refused = len(self.net.refused)
        return [f"{self._labels(set(peers))}: {words}" for words, peers in lines.items()]

    def _words(self, event: Any) -> str:
        match event:
            case said.Began():
                after_s = self.net.began_at[event.round] - self.first_offer_at[event.round]
                words = f"begins {event.round} with {self._labels(event.group)} after {after_s:.1f} s"
            case said.Committed():
                in_all = set.intersection(*(set(part) for part in contributors_of(event)))
                words = f"committed {event.round} of {self._labels(in_all)}"
            case said.MissedSlices():
                why = wire.Missed.Name(event.reason).lower().replace("_", " ")
                words = f"missed {event.parts} parts of {event.round} ({why} at {self._labels(event.owners)})"
            case said.Aborted():
                words = f"aborted {event.round}: {self._plain(event.reason)}"
            case said.OutcomeWithoutBytes():
                words = f"hears of {event.round}, to fetch of {self._labels(event.donors)}"
            case said.FellBehind():
                words = f"fell behind, to version {event.version} of {self._labels(event.donors)}"
            case said.Refused():
                words = f"refuses {self.label_of[event.peer]}: {event.reason}"
            case said.Distrusted():
                words = f"distrusts {self.label_of[event.peer]}: {self._plain(event.reason)}"
            case _:
                words = type(event).__name__.lower()
        return words

    def _remark(self, message: Message) -> str:
        match message:
            case wire.Ready() if message.withdrawn:
                return " withdrawn"
            case wire.Waiting():
                return f" ({self._plain(message.refusal)})" if message.refusal else ""
            case wire.Behind():
                return f" of version {message.version}"
            case wire.Result():
                words = ["gave up"] * message.gave_up + ["again"] * message.again
                words += ["vote"] * bool(message.digest) + ["refused"] * bool(message.refused)
                words += [f"lacks {len(message.lost)}"] * bool(message.lost)
                return f" ({', '.join(words)})"
        return ""

    def _made(self, label: str, kind: str, fields: dict[str, str]) -> Message:
        """An honest message of this kind in round 1, changed."""
        sent = (m for _, _, m in reversed(self.net.sent) if isinstance(m, wire.Begin))
        begun = self.begun or next(sent, None)
        message = KINDS[kind]()
        match message:
            case wire.Ready() | wire.Waiting() | wire.Behind():
                message.round = int(fields.get("round", "1"))
                if isinstance(message, wire.Ready):
                    message.weight = 1.0
                    message.offer_id = bytes(8)
                    message.base_version = max(0, message.round - 1)
                if not isinstance(message, wire.Waiting):
                    message.state_digest = START
            case wire.Begin():
                message.CopyFrom(self.begun or self._begin())
            case wire.Decision():
                pass
            case _:
                message.key.CopyFrom(self._begin().key if begun is None else begun.key)  # type: ignore[attr-defined]
        if isinstance(message, wire.Part | wire.Mean):
            message.part = self.net.names.index(self.peers[label])
            message.total = 64
            message.data = bytes(64)
        for path, text in fields.items():
            self._assign(message, path, text)
        return message

    def _begin(self) -> wire.Begin:
        """The group of all peers, each of which averages one equal part."""
        names = self.net.names
        size = self.net.shape.blocks[0] // len(names)
        begin = wire.Begin(
            key=wire.RoundKey(round=1), state_digest=START, parts_within_s=5, result_within_s=12,
            nonce=bytes(16), live=len(names),
            members=[
                wire.Member(peer=peer, weight=1.0, offer_id=self.net.offer_ids.get(peer, bytes(8)))
                for peer in names
            ],
            parts=[
                wire.PartSpec(owner=peer, start_block=size * index, stop_block=size * (index + 1))
                for index, peer in enumerate(names)
            ],
        )  # fmt: skip
        begin.parts[-1].stop_block = self.net.shape.blocks[0]
        seal_begin(begin, self.peers["a"])
        return begin

    def _assign(self, message: Any, path: str, text: str) -> None:
        """``parts.1.start_block=9``; ``members=`` clears a list, ``lost=7`` gives it one item of that part,
        ``x+=`` repeats its first item so often."""
        *heads, last = path.split(".")
        for head in heads:
            if head == "*":
                for one in message:
                    self._assign(one, last, text)
                return
            message = message[int(head)] if head.isdigit() else getattr(message, head)
        field = message.DESCRIPTOR.fields_by_name[last]
        if not field.is_repeated:
            setattr(message, last, self._value(field, text))
            return
        old = list(getattr(message, last))
        message.ClearField(last)
        if text.startswith("x"):
            getattr(message, last).extend(old + old[:1] * int(text[1:]))
        elif text and field.message_type is not None:
            getattr(message, last).add(part=int(text))

    def _value(self, field: Field, text: str) -> Any:
        if field.type == Field.TYPE_BYTES:
            return DIGESTS.get(text) or text[:1].encode() * int(text[2:] or "0")
        if field.type == Field.TYPE_STRING:
            return self._peer(text)
        return {Field.TYPE_DOUBLE: float, Field.TYPE_BOOL: lambda word: word == "yes"}.get(field.type, int)(
            text
        )


def _of_view(name: str, text: str) -> Any:
    match name:
        case "training" | "is_missed" | "counted":
            return text == "yes"
        case "versions":
            return (int(text),)
        case "finished":
            return frozenset({0}) if text == "yes" else frozenset()
    return float(text)
