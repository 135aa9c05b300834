"""Credit: what a peer gave to a run, counted from certificates, and what another can check of it.

A record is lines of JSON: ``Holder``, then a ``CreditLine`` for each committed round in which the peer was
counted, with its certificate. ``export`` signs it; ``open_credit`` checks what another exported.

Laws: a round's tokens count by the share of the model that its fragment is, in the blocks that certificates
name. So over all peers credits come to what the certificates come to. What counts is what the group counted,
never what a peer claimed, and an outcome counts once. An export is hostile until checked: its size before it
is read, a certificate's before it is decompressed.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2p_co2.config import stage_digest
from p2p_co2.digest import digest
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.reports import MAX_REAL, MAX_ROUND, read_decision
from p2p_co2.wire.identity import Identity, parsed, verify
from p2p_co2.wire.limits import MAX_FRAGMENTS, MAX_MESSAGE_BYTES, MAX_PEER_ID, MAX_STAGES, MAX_STRING
from p2p_co2.wire.messages_pb2 import Decision, Outcome

CREDIT_CONTEXT = b"p2p-co2 credit"
_Kind = TypeVar("_Kind", bound=BaseModel)
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Real = Annotated[float, Field(ge=0, le=MAX_REAL, allow_inf_nan=False)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Holder(_Line):
    """Whose record it is, and of what. ``run``: the run's digest, ``name``: its name. ``blocks``: of each
    fragment, as certificates count them."""

    most_bytes: ClassVar[int] = 4 << 20
    """Of a record; past it the older half of its rounds is dropped, and lives on in the sums. An export
    has at most twice as much: its quotation marks are escaped."""

    peer: str = Field(max_length=MAX_PEER_ID)
    run: _Digest
    name: str = Field(max_length=MAX_STRING)
    stage: int = Field(ge=0, lt=MAX_STAGES)
    stages: int = Field(ge=1, le=MAX_STAGES)
    blocks: tuple[Annotated[int, Field(ge=1, lt=2**32)], ...] = Field(min_length=1, max_length=MAX_FRAGMENTS)

    @property
    def group(self) -> bytes:
        """The digest under which the rounds are made."""
        return stage_digest(bytes.fromhex(self.run), self.stage, self.stages)

    def share(self, fragment: int) -> float:
        """How much of the model that fragment is, 0 to 1."""
        return self.blocks[fragment] / sum(self.blocks)


class CreditLine(_Line):
    """One round. ``tokens``: of the holder in it. ``rounds_so_far``, ``tokens_so_far``: with this one and all
    before it, since ``since_at``. ``outcome``: its digest, ``certificate``: zlib, in base64. Times are unix
    seconds."""

    at: _Real
    fragment: int = Field(ge=0, lt=MAX_FRAGMENTS)
    round: int = Field(ge=1, le=MAX_ROUND)
    tokens: _Real
    rounds_so_far: _Count
    tokens_so_far: _Real
    since_at: _Real
    outcome: _Digest
    certificate: str = Field(max_length=MAX_MESSAGE_BYTES)


class _Export(_Line):
    record: list[str] = Field(min_length=2, max_length=1 << 15)
    signature: str = Field(pattern="^[0-9a-f]{128}$")


def line_of(kind: type[_Kind], line: str | bytes) -> _Kind:
    """What one line says. Raises ``RemoteProtocolError``."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "a line"
        raise RemoteProtocolError(Offence.UNREADABLE, f"{where}: {first['msg']}"[:200]) from None


def credit_line(holder: Holder, decision: Decision, at: float, last: CreditLine | None) -> CreditLine | None:
    """What a committed round adds after ``last``; None if the holder was not counted in it. The certificate
    was checked before."""
    told, _ = read_decision(decision, holder.group, at)
    tokens = told.weights.get(holder.peer, 0.0) * holder.share(told.fragment)
    if not tokens:
        return None
    packed = zlib.compress(decision.SerializeToString(deterministic=True), 9)
    return CreditLine(
        at=at, fragment=told.fragment, round=told.round, tokens=tokens,
        rounds_so_far=1 + (last.rounds_so_far if last else 0),
        tokens_so_far=tokens + (last.tokens_so_far if last else 0.0), since_at=last.since_at if last else at,
        outcome=digest(decision.outcome).hex(), certificate=base64.b64encode(packed).decode(),
    )  # fmt: skip


def export(record: Sequence[BaseModel], identity: Identity) -> bytes:
    """The record (``Holder``, then ``CreditLine``), signed by its holder: what ``open_credit`` checks."""
    lines = [one.model_dump_json() for one in record]
    signature = identity.sign(CREDIT_CONTEXT, "\n".join(lines).encode()).hex()
    return _Export(record=lines, signature=signature).model_dump_json(indent=1).encode() + b"\n"


@dataclass(frozen=True)
class Credit:
    """A checked export. ``rounds``, ``tokens``: proven by its certificates; ``witnessed``: rounds and tokens
    of these that ``witnesses`` signed, too. ``earlier``: rounds and tokens before them, and ``unseen``: the
    fragments whose blocks no certificate names, are the holder's word. So are the times in ``curve``: (unix
    seconds, tokens so far)."""

    holder: Holder
    rounds: int
    tokens: float
    witnessed: tuple[int, float]
    witnesses: frozenset[str]
    earlier: tuple[int, float]
    unseen: tuple[int, ...]
    curve: tuple[tuple[float, float], ...]

    @property
    def all_tokens(self) -> float:
        return self.earlier[1] + self.tokens


def open_credit(data: bytes) -> Credit:
    """Check what ``export`` made. Raises ``RemoteProtocolError`` if anything in it does not hold."""
    if len(data) > 2 * Holder.most_bytes:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"a credit of {len(data)} bytes")
    said = line_of(_Export, data)
    holder = line_of(Holder, said.record[0])
    verify(holder.peer, CREDIT_CONTEXT, "\n".join(said.record).encode(), bytes.fromhex(said.signature))
    lines = [line_of(CreditLine, line) for line in said.record[1:]]
    first = lines[0]
    earlier = max(0, first.rounds_so_far - 1), max(0.0, first.tokens_so_far - first.tokens)
    curve = [(first.since_at, 0.0)]
    tokens = 0.0
    witnessed = list[float]()
    witnesses = set[str]()
    seen = dict[bytes, int]()
    left_bytes = 64 * Holder.most_bytes  # all certificates, decompressed
    for line in lines:
        data = _certificate(line, left_bytes)
        left_bytes -= len(data)
        decision = parsed(Decision, data)
        told, signers = read_decision(decision, holder.group, line.at)
        blocks = max(part.stop_block for part in Outcome.FromString(decision.outcome).parts)
        outcome = digest(decision.outcome)
        of_model = holder.blocks[told.fragment : told.fragment + 1]
        counted_tokens = told.weights.get(holder.peer, 0.0) * holder.share(told.fragment) if of_model else 0.0
        if outcome in seen or of_model != (blocks,) or not counted_tokens == line.tokens > 0:
            raise RemoteProtocolError("wrong credit", f"round {told.round} of fragment {told.fragment}")
        seen[outcome] = told.fragment
        tokens += counted_tokens
        curve.append((line.at, earlier[1] + tokens))
        if others := signers - {holder.peer}:
            witnesses |= others
            witnessed.append(counted_tokens)
    unseen = tuple(index for index in range(len(holder.blocks)) if index not in seen.values())
    return Credit(
        holder, len(lines), tokens, (len(witnessed), sum(witnessed)), frozenset(witnesses), earlier, unseen,
        tuple(curve),
    )  # fmt: skip


def _certificate(line: CreditLine, left_bytes: int) -> bytes:
    try:
        inflater = zlib.decompressobj()
        packed = base64.b64decode(line.certificate, validate=True)
        data = inflater.decompress(packed, max(1, min(left_bytes, MAX_MESSAGE_BYTES)))
    except (binascii.Error, zlib.error, ValueError):
        raise RemoteProtocolError(Offence.UNREADABLE, "a certificate that is no zlib in base64") from None
    if not inflater.eof or inflater.unused_data:
        raise RemoteProtocolError(Offence.TOO_LARGE, "a certificate, or something behind it")
    return data


def whole_lines(text: bytes) -> Iterator[CreditLine]:
    """The rounds of a record's text that can be read: not a line that was torn."""
    for line in text.split(b"\n"):
        try:
            yield line_of(CreditLine, line)
        except RemoteProtocolError:
            continue
