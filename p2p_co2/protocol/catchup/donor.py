"""The donor: serves past rounds and exported states in chunks, within memory bounds.

A state is exported when somebody asks and kept while it is being loaded, so that the chunks of one version
stay the same although the swarm commits meanwhile (the state itself until then, memory beyond it only
afterwards); the rounds since are held as well, and for a while after it, for the newcomer to replay. Laws:
one large export at a time (``EXPORTS_FREE_BYTES``), none for longer than its idle and its whole time allow;
who asks for another meanwhile is told what is being given, and to come again, and has its turn before who
comes later (``turns``). Whatever is asked, the tensor side is busy with large exports for at most one part in
1 + ``EXPORT_REST`` of its time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import ROUND, STATE, ExportWanted, Outbox, Shape
from p2p_co2.protocol.catchup.history import HISTORY_ROUNDS_KEPT, History
from p2p_co2.protocol.catchup.manifest import chunk_at, make_manifest
from p2p_co2.protocol.catchup.turns import MAX_WAITING, Loaders, Turns
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal
from p2p_co2.system.memory import Buffer, Joined

EXPORT_KEPT_S = 15.0
"""An export that nobody asks for is dropped after this long: a newcomer that was interrupted may be back."""
EXPORT_LONGEST_S = 60.0
EXPORT_SLOWEST_BYTES_PER_S = 250e3
"""Nobody has an export in use for longer than ``EXPORT_LONGEST_S`` and the time its bytes take at this rate,
and a large one is kept no longer."""
SLOWLY_KEPT_S, SLOWLY_LONGEST_S = 60.0, 600.0
"""The same for one within ``EXPORTS_FREE_BYTES`` that somebody takes chunks of: over a slow line the next one
is asked for when the last has come. It makes room for whoever wants another; a newcomer loads for no longer
(``trainer.connection``)."""
REPLAYED_WITHIN_S, REPLAYED_LONGEST_S = 60.0, 300.0
"""So long after an export that somebody loaded has gone, and after each time that one of the rounds since was
given, those are kept: who loaded it checks it and takes it over first. So long in any case, and of
one fragment at a time."""
EXPORT_REST = 3.0
"""How many times as long as an export took no other is begun, if all states together are large: the rounds
need the same thread. A newcomer takes longer to load one anyway."""

TAKERS_KEPT = 64
"""So many of those who were given something last are remembered: more than a donor gives to at a time."""


@dataclass
class _Export:
    version: int
    data: bytes | Joined
    made_at: float
    manifest: Manifest
    loaders: Loaders
    shape: Shape

    @property
    def is_taken_slowly(self) -> bool:
        """Whether it is kept for those who take long over it."""
        return self.shape.is_free(len(self.data)) and self.loaders.take_any

    def turn_ends_at(self) -> float:
        """When nobody can have it in use any more."""
        real_bytes = len(self.data) * self.shape.scale
        return self.made_at + EXPORT_LONGEST_S + real_bytes / EXPORT_SLOWEST_BYTES_PER_S

    def ends_at(self) -> float:
        kept_s, longest_at = EXPORT_KEPT_S, self.turn_ends_at()
        if self.is_taken_slowly:
            kept_s, longest_at = SLOWLY_KEPT_S, max(longest_at, self.made_at + SLOWLY_LONGEST_S)
        return min(self.loaders.asked_last_at + kept_s, longest_at)

    def is_in_use(self, now: float, but_for: PeerId) -> bool:
        """By anybody else."""
        return now < self.turn_ends_at() and self.loaders.is_in_use(now, but_for)


class _Replayed:
    """The rounds after a state are kept although its export has gone at ``gone_at``."""

    def __init__(self, fragment: int, version: int, gone_at: float) -> None:
        self.fragment, self.version = fragment, version
        self._longest_at = gone_at + REPLAYED_LONGEST_S
        self.until = gone_at + REPLAYED_WITHIN_S

    def gave(self, fetch: Fetch, now: float) -> None:
        """A chunk of a round."""
        if fetch.fragment == self.fragment and fetch.version > self.version:
            self.until = min(now + REPLAYED_WITHIN_S, self._longest_at)


class Donor:
    """Holds the last rounds' means and the states that somebody is loading now. ``versions``: where every
    fragment of this peer is."""

    def __init__(self, identity: Identity, run: bytes, shape: Shape, out: Outbox) -> None:
        self._identity, self._run, self._shape, self._out = identity, run, shape, out
        self.versions = [0] * len(shape.state_bytes)
        self.history = History(shape)
        self._exports: OrderedDict[tuple[int, int], _Export] = OrderedDict()
        self._replayed: _Replayed | None = None
        """The last export that had to make room, or whose time was up, while the rounds since are kept."""
        self._waiting: dict[int, list[tuple[PeerId, Fetch]]] = {}
        self._began_at: dict[int, float] = {}
        """When the tensor side was asked for the exports that are waited for."""
        self._rests_until = -math.inf
        self._turns = Turns()
        self.given = [-1] * len(shape.state_bytes)
        """Of each fragment, the newest version of which anybody was sent a chunk."""
        self.gave: dict[PeerId, float] = {}
        """Who was sent a chunk of a round, or one of a state that it had not been sent before, and when last;
        the last ``TAKERS_KEPT``. Other threads look at it."""
        self.going_over: set[int] = set()
        """Fragments of which nobody is given anything just now: work that nobody was given goes back."""

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``CatchUp.held``."""
        most = max([len(self._turns), *map(len, self._waiting.values())])
        kept = HISTORY_ROUNDS_KEPT * len(self.versions)
        return {
            "HISTORY_ROUNDS_KEPT": (len(self.history), kept),
            "MAX_WAITING": (most, MAX_WAITING),
            "TAKERS_KEPT": (len(self.gave), TAKERS_KEPT),
        }

    def takers(self, now: float, within_s: float) -> list[PeerId]:
        """Who was given anything of late."""
        return [peer for peer, at in list(self.gave.items()) if now - at <= within_s]

    def _gave(self, peer: PeerId, now: float) -> None:
        self.gave[peer] = now  # never taken out to be put back: who looks meanwhile would miss it
        if len(self.gave) > TAKERS_KEPT:
            del self.gave[min(self.gave, key=self.gave.__getitem__)]

    def exported_bytes(self) -> int:
        """What is held for others to load."""
        return sum(len(export.data) for export in self._exports.values())

    def exported(
        self,
        fragment: int,
        version: int,
        data: bytes | Joined,
        digest: bytes,
        chunk_digests: list[bytes],
        now: float,
    ) -> None:
        """The answer to ``ExportWanted``."""
        place = Fetch(what=STATE, fragment=fragment, version=version)
        manifest = make_manifest(
            self._identity, self._run, place, len(data), chunk_digests, digest=digest,
            chunk_bytes=self._shape.chunk_bytes,
        )  # fmt: skip
        self._exports[fragment, version] = _Export(version, data, now, manifest, Loaders(now), self._shape)
        self._exports_changed()
        if not self._shape.is_free(sum(self._shape.state_bytes)):
            self._rests_until = now + EXPORT_REST * (now - self._began_at.pop(fragment, now))
        for peer, fetch in self._waiting.pop(fragment, []):
            if _suits(fetch, version):
                self._send_manifest(fetch, peer, self._exports[fragment, version], now, is_its_turn=True)
            else:
                self._refuse_version(fetch, peer, version)

    def takes_nothing(self, peer: PeerId) -> None:
        """What ``peer`` asked for was dropped, since it does not take what lies before its line already."""
        for export in self._exports.values():
            export.loaders.takes_nothing(peer)

    def turned_back(self, fragment: int) -> None:
        """As ``CatchUp.turned_back``."""
        self.history.drop(fragment)
        if self._replayed is not None and self._replayed.fragment == fragment:
            self._replayed = None
        for key in [key for key in self._exports if key[0] == fragment]:
            del self._exports[key]
        self._exports_changed()
        self.given[fragment] = -1  # the numbers begin anew

    def receive(self, fetch: Fetch, sender: PeerId, now: float) -> None:
        """Answer a peer that is behind; raises ``RemoteProtocolError`` for a chunk that cannot be."""
        size = self._shape.bytes_of(fetch.what, fetch.fragment)
        if fetch.want_chunk and chunk_at(fetch.chunk, size, self._shape.chunk_bytes).start >= size:
            raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {size} bytes")
        if fetch.fragment in self.going_over:
            self._refuse(fetch, sender, "going over to another state", again=True)
        elif fetch.what == ROUND:
            self._serve_round(fetch, sender, now)
        elif fetch.want_chunk:
            self._serve_chunk(fetch, sender, now)
        else:
            self._serve_manifest(fetch, sender, now)

    def handle_timer(self, now: float) -> None:
        over = [key for key, export in self._exports.items() if now >= export.ends_at()]
        is_replayed = self._replayed is not None and now >= self._replayed.until
        if is_replayed:
            self._replayed = None
        for key in over:
            if self._exports.pop(key).loaders.take_any and self._replayed is None:
                self._replayed = _Replayed(*key, now)
        if over or is_replayed:
            self._exports_changed()

    def get_timer(self) -> float | None:
        ends = [export.ends_at() for export in self._exports.values()]
        if self._replayed is not None:
            ends.append(self._replayed.until)
        return min(ends, default=None)

    # ---- rounds

    def _serve_round(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        kept = self.history.find(fetch.fragment, fetch.version)
        if kept is None:
            early = self.versions[fetch.fragment] < fetch.version
            reason = "round not applied yet" if early else "round not kept"
            self._refuse(fetch, peer, reason, newest=self.history.newest(fetch.fragment), again=early)
        elif fetch.want_chunk:
            self._send_chunk(fetch, peer, kept.mean)
            self._gave(peer, now)
            if self._replayed is not None:
                self._replayed.gave(fetch, now)
        else:
            if kept.manifest is None:
                digests, size = kept.chunk_digests(self._shape.chunk_bytes), len(kept.mean)
                kept.manifest = make_manifest(
                    self._identity, self._run, fetch, size, digests, decision=kept.decision,
                    chunk_bytes=self._shape.chunk_bytes,
                )  # fmt: skip
            self._answer(fetch, peer, kept.manifest)

    # ---- states

    def _serve_chunk(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        export = self._exports.get((fetch.fragment, fetch.version))
        if export is None:
            self._refuse(fetch, peer, "that state is no longer kept")
            return
        export.loaders.asked(peer, now)
        size_bytes = self._send_chunk(fetch, peer, export.data)
        if export.loaders.gave(peer, fetch.chunk, size_bytes * self._shape.scale, now):
            self._gave(peer, now)
            self._turns.took(peer, fetch.fragment)

    def _serve_manifest(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        """The newest state, if there is room for it; else one that is there already; else come again."""
        current = self.versions[fetch.fragment]
        export = self._exports.get((fetch.fragment, current))
        if export is None or not _suits(fetch, current):
            older = [
                known
                for (fragment, version), known in self._exports.items()
                if fragment == fetch.fragment and _suits(fetch, version)
            ]
            if _suits(fetch, current) and (
                fetch.fragment in self._waiting
                or (self._turns.may_have_room(peer, fetch.fragment, now) and self._has_room(fetch, peer, now))
            ):
                self._wait(fetch, peer, now)
                return
            export = max(older, key=lambda known: known.version, default=None)
        if export is not None:
            self._send_manifest(fetch, peer, export, now)
        elif _suits(fetch, current):
            self._turns.turned_away(peer, fetch.fragment, now)
            serving = next((fragment for fragment, _ in self._exports), next(iter(self._waiting), -1))
            self._refuse(fetch, peer, "busy with another newcomer", again=True, serving=serving + 1)
        else:
            self._refuse_version(fetch, peer, current)

    def _has_room(self, fetch: Fetch, peer: PeerId, now: float) -> bool:
        """Drop exports that nobody else uses, as far as it takes; False if those in use leave no room. What
        ``peer`` asked for last goes last: where it still loads another it has just said so
        (``still_loads``)."""
        if now < self._rests_until:
            return False
        wanted = self._shape.state_bytes[fetch.fragment]
        pending = sum(self._shape.state_bytes[fragment] for fragment in self._waiting)
        idle = [key for key, known in self._exports.items() if not known.is_in_use(now, but_for=peer)]
        idle.sort(key=lambda key: self._exports[key].loaders.asked_at(peer))
        for key in (*idle, None):
            held = self.exported_bytes() + pending
            if not held or self._shape.is_free(held + wanted):
                return True
            if key is not None:
                if self._exports.pop(key).loaders.take_any:
                    self._replayed = _Replayed(*key, now)
                self._exports_changed()
        return False

    def _wait(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        waiting = self._waiting.setdefault(fetch.fragment, [])
        if len(waiting) >= MAX_WAITING:
            self._refuse(fetch, peer, "too many newcomers, try another donor", again=True)
            return
        waiting.append((peer, fetch))
        if len(waiting) == 1:
            self._began_at[fetch.fragment] = now
            self._out.emit(ExportWanted(fetch.fragment))

    def _exports_changed(self) -> None:
        held = {} if self._replayed is None else {self._replayed.fragment: self._replayed.version}
        for fragment, version in self._exports:
            held[fragment] = min(version, held.get(fragment, version))
        self.history.hold(held)

    # ---- answers

    def _send_manifest(
        self, fetch: Fetch, peer: PeerId, export: _Export, now: float, *, is_its_turn: bool = False
    ) -> None:
        export.loaders.asked(peer, now)
        if not export.loaders.has_taken(peer):
            until = self._turns.promised(peer, fetch.fragment, now, is_its_turn)
            export.loaders.keep_for(peer, until)
        self._answer(fetch, peer, export.manifest)

    def _answer(self, fetch: Fetch, peer: PeerId, signed: Manifest) -> None:
        manifest = Manifest()
        manifest.CopyFrom(signed)
        manifest.request = fetch.request
        self._out.send(peer, manifest)

    def _send_chunk(self, fetch: Fetch, peer: PeerId, data: Buffer | Joined) -> int:
        """How many bytes it has."""
        chunk = Chunk(
            request=fetch.request,
            what=fetch.what,
            fragment=fetch.fragment,
            version=fetch.version,
            chunk=fetch.chunk,
            data=bytes(data[chunk_at(fetch.chunk, len(data), self._shape.chunk_bytes)]),
        )
        self.given[fetch.fragment] = max(self.given[fetch.fragment], fetch.version)
        self._out.send(peer, chunk)
        return len(chunk.data)

    def _refuse_version(self, fetch: Fetch, peer: PeerId, version: int) -> None:
        early = version < fetch.version
        reason = f"at version {version}, {'not there yet' if early else 'past it'}"
        self._refuse(fetch, peer, reason, newest=version, again=early)

    def _refuse(
        self,
        fetch: Fetch,
        peer: PeerId,
        reason: str,
        *,
        newest: int = 0,
        again: bool = False,
        serving: int = 0,
    ) -> None:
        refusal = Refusal(
            request=fetch.request, reason=reason, newest_version=newest, again=again, serving=serving
        )
        self._out.send(peer, refusal)


def _suits(fetch: Fetch, version: int) -> bool:
    """Whether a state of ``version`` is of use to who asks."""
    return fetch.version <= version and (not fetch.newest or version <= fetch.newest)
