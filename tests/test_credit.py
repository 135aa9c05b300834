"""credit: what a peer gave, counted from certificates and kept, and what another can check of it."""

from __future__ import annotations

import base64
import json
import random
import socket
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.feeds import RelayedFeed
from p2p_co2.cli.main import main
from p2p_co2.config import stage_digest
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.credit import CreditFile, credit_files, last_counted, read_credit
from p2p_co2.protocol import credit as rules
from p2p_co2.protocol.credit import Credit, CreditLine, Holder, export, open_credit
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.wire.messages_pb2 import Decision, Outcome
from tests.certificates import certify

RUN = bytes(range(32))
A, B, C = PEERS = sorted((Identity.generate() for _ in range(3)), key=lambda one: one.peer_id)
BLOCKS = (30, 10)
"""Of fragment 0, three quarters of the model, and of fragment 1."""


def holder(who: Identity = A, **changes: Any) -> Holder:
    given = {"peer": who.peer_id, "run": RUN.hex(), "name": "a-run", "stage": 0, "stages": 1}
    return Holder.model_validate({**given, "blocks": BLOCKS, **changes})


def decision(
    round_: int, fragment: int = 0, work: dict[Identity, float] | None = None, signers: Any = PEERS,
    halves: bool = False, group: bytes = RUN,
) -> Decision:  # fmt: skip
    """A commit in two parts; with ``halves`` the first member's slice is in the first part alone."""
    work = {A: 100.0, B: 60.0, C: 40.0} if work is None else work
    outcome = Outcome(run=group, coordinator=min(one.peer_id for one in work), live=len(work))
    outcome.state_digest = bytes(32)
    outcome.key.fragment, outcome.key.round, outcome.key.attempt = fragment, round_, round_.to_bytes(16)
    for who, weight in sorted(work.items(), key=lambda one: one[0].peer_id):
        outcome.members.add(peer=who.peer_id, weight=weight)
    half = BLOCKS[fragment] // 2
    for part, (start, stop) in enumerate(((0, half), (half, BLOCKS[fragment]))):
        made = outcome.parts.add(start_block=start, stop_block=stop, digest=bytes(32))
        for member in outcome.members[int(halves and part) :]:
            made.contributors.add(peer=member.peer, weight=member.weight)
    return certify(outcome, *(one for one in signers if one in work))


def taken(folder: Path, *decisions: Decision, who: Identity = A, **of: Any) -> CreditFile:
    """A peer's process that hears of these commits."""
    file = CreditFile(folder, holder(who, **of), pytest.fail)
    for one in decisions:
        file.take(one)
    return file


def exported(folder: Path, who: Identity = A) -> bytes:
    head, lines = read_credit(credit_files(folder)[-1])
    return export([head, *lines], who)


def test_a_rounds_tokens_count_by_the_share_of_the_model_that_the_fragment_is(tmp_path: Path) -> None:
    taken(tmp_path, decision(1), decision(1, fragment=1), decision(2, halves=True))
    last = last_counted(tmp_path)
    assert last is not None
    assert last.rounds_so_far == 3
    assert last.tokens_so_far == pytest.approx(100 * 0.75 + 100 * 0.25 + 100 * 0.75 / 2)
    assert read_credit(credit_files(tmp_path)[0])[1][-1] == last
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(RelayedFeed(theirs, tmp_path)) as feed:  # what the board shows of it
        assert feed.tokens_in_model() == last.tokens_so_far


def test_the_credits_of_all_peers_are_what_the_certificates_say_also_after_all_restarted(
    tmp_path: Path,
) -> None:
    chance = random.Random(7)
    told = [
        decision(number, number % 2, {one: chance.uniform(1, 900) for one in group}, halves=number % 4 == 3)
        for number in range(1, 25)
        for group in [chance.sample(PEERS, 1 + number % 3)]
    ]
    whole = 0.0
    for one in told:
        outcome = Outcome.FromString(one.outcome)
        share = BLOCKS[outcome.key.fragment] / sum(BLOCKS)
        whole += share * sum(c.weight for part in outcome.parts for c in part.contributors) / 2
    for index, who in enumerate(PEERS):
        place = tmp_path / str(index)
        place.mkdir()
        taken(place, *told[:11], who=who)
        with credit_files(place)[0].open("ab") as file:
            file.write(b'{"at": 17')  # killed in mid-line
        taken(place, *told[8:], who=who)  # and some rounds are replayed to it
    lasts = [last_counted(tmp_path / str(index)) for index in range(3)]
    assert sum(last.tokens_so_far for last in lasts if last) == pytest.approx(whole)
    proven = [open_credit(exported(tmp_path / str(index), who)) for index, who in enumerate(PEERS)]
    assert sum(one.tokens for one in proven) == pytest.approx(whole)
    assert not any(one.earlier[0] for one in proven)


def test_the_record_is_bounded_and_the_sums_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "most_bytes", 16 << 10)
    most_bytes = 0
    file = CreditFile(tmp_path, holder(), pytest.fail)
    for number in range(1, 101):
        file.take(decision(number))
        most_bytes = max(most_bytes, credit_files(tmp_path)[0].stat().st_size)
    assert most_bytes < 18 << 10
    credit = open_credit(exported(tmp_path))
    assert 3 < credit.rounds < 20
    assert credit.earlier[0] == 100 - credit.rounds
    assert credit.earlier[1] == pytest.approx(75.0 * (100 - credit.rounds))
    assert credit.all_tokens == pytest.approx(7500.0)
    assert credit.unseen == (1,)
    before = last_counted(tmp_path)
    taken(tmp_path)  # a process that is counted in nothing
    assert last_counted(tmp_path) == before


def test_a_disk_that_refuses_is_told_once_and_rounds_count_again_when_it_gives_way(tmp_path: Path) -> None:
    warned = list[str]()
    file = CreditFile(tmp_path / "gone", holder(), warned.append)
    file.take(decision(1))
    file.take(decision(2))
    assert len(warned) == 1
    assert "free its disk" in warned[0]
    (tmp_path / "gone").mkdir()
    file.take(decision(3))
    last = last_counted(tmp_path / "gone")
    assert last is not None
    assert (last.round, last.rounds_so_far) == (3, 1)


def test_what_others_signed_is_told_from_what_the_holder_alone_signed(tmp_path: Path) -> None:
    alone = decision(1, work={A: 100.0})
    named = decision(2, work={A: 100.0, B: 60.0}, signers=[A])  # B never heard of it
    taken(tmp_path, alone, named, decision(3))
    credit = open_credit(exported(tmp_path))
    assert (credit.rounds, credit.tokens) == (3, 225.0)
    assert credit.witnessed == (1, 75.0)
    assert credit.witnesses == {B.peer_id, C.peer_id}


def test_a_peer_of_a_stage_is_counted_under_the_digest_of_its_stage(tmp_path: Path) -> None:
    taken(tmp_path, decision(1, group=stage_digest(RUN, 2, 4)), stage=2, stages=4)
    assert open_credit(exported(tmp_path)).rounds == 1
    with pytest.raises(RemoteProtocolError, match="wrong run"):
        taken(tmp_path, decision(1), stage=1, stages=4)


# ---- lies


def lie(head: Holder, lines: list[CreditLine], who: Identity = A) -> Credit:
    return open_credit(export([head, *lines], who))


def test_an_export_that_says_more_than_its_certificates_is_refused(tmp_path: Path) -> None:
    taken(tmp_path, decision(1), decision(2))
    head, (one, two) = read_credit(credit_files(tmp_path)[0])
    bomb = base64.b64encode(zlib.compress(bytes(MAX_MESSAGE_BYTES + 1))).decode()
    unsigned = decision(3, signers=[C])
    packed = base64.b64encode(zlib.compress(unsigned.SerializeToString())).decode()
    for wrong, why in (
        ((head, [one, one]), "wrong credit: round 1"),
        ((head, [one.model_copy(update={"tokens": 76.0})]), "wrong credit: round 1"),
        ((head.model_copy(update={"blocks": (31, 10)}), [one]), "wrong credit: round 1"),
        ((head.model_copy(update={"blocks": ()}), [one]), "blocks"),
        ((head.model_copy(update={"run": "00" * 32}), [one]), "wrong run"),
        ((head.model_copy(update={"peer": B.peer_id}), [one]), "wrong signature"),
        ((head, [one.model_copy(update={"certificate": bomb})]), "too large"),
        ((head, [one.model_copy(update={"certificate": "?"})]), "unreadable"),
        ((head, [one.model_copy(update={"certificate": packed})]), "no quorum"),
        ((head, [one.model_copy(update={"at": float("inf")})]), "at"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            lie(*wrong)
    assert lie(head, [one, two]).tokens == 150.0
    stranger = holder(Identity.generate())
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        lie(stranger, [one], A)
    with pytest.raises(RemoteProtocolError, match="too large"):
        open_credit(b" " * (2 * Holder.most_bytes + 1))


@given(st.data())
def test_a_damaged_export_is_refused_or_says_the_same(data: st.DataObject) -> None:
    lines, last = list[CreditLine](), None
    for number in (1, 2):
        last = rules.credit_line(holder(), decision(number), 1.8e9 + number, last)
        assert last is not None
        lines.append(last)
    whole = export([holder(), *lines], A)
    wrong = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(wrong) - 1))
        wrong[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        found = open_credit(bytes(wrong))
    except RemoteProtocolError:
        return
    assert found == open_credit(whole)


@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["record", "signature", "peer", "blocks", "at"]), inner, max_size=4),
))  # fmt: skip
def test_any_json_is_refused_in_words(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        open_credit(json.dumps(value).encode())
    lines = [json.dumps(value), json.dumps(value)]
    signature = A.sign(rules.CREDIT_CONTEXT, "\n".join(lines).encode()).hex()
    signed = json.dumps({"record": lines, "signature": signature}).encode()
    with pytest.raises(RemoteProtocolError):
        open_credit(signed)


# ---- the command


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Status, output and errors of ``p2p-co2 credit``."""
    try:
        status = main(["credit", *map(str, arguments)])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_peer_shows_what_it_gave_and_another_checks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "identity").write_bytes(A.libp2p_bytes())
    assert "was counted in no round" in said(capsys, tmp_path)[2]
    taken(tmp_path, decision(1), decision(2), name="<script>&\x1b[2J")
    status, out, _ = said(capsys, tmp_path, "--picture", tmp_path / "mine.svg")
    assert status == 0
    assert "gave 150 tokens in 2 fragment exchanges" in out
    assert "2 exchanges, 150 tokens, are signed by others, too (2)" in out
    drawn = (tmp_path / "mine.svg").read_text(encoding="utf-8")
    assert "150 tokens for the run <script>&?[2J" in "".join(ElementTree.fromstring(drawn).itertext())
    exported = tmp_path / "credit.json"
    exported.write_text(said(capsys, tmp_path, "--json")[1], encoding="utf-8")
    status, out, _ = said(capsys, "--check", exported)
    assert status == 0
    assert "\x1b" not in out
    assert "claims 150 tokens" in out
    assert f"others that signed: {B.peer_id}, {C.peer_id}" in out
    assert "counted 150 tokens of it in 2 exchanges" in out
    home = tmp_path / "data"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    folder = home / "p2p-co2" / "runs" / "0a" / "peer"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path)
    (tmp_path / "name").write_text("ada\nfirst-run\n", encoding="utf-8")
    assert "gave 150 tokens" in said(capsys, "ada")[1]
    assert str(folder) in said(capsys, "nobody")[2]  # those that there are
    for words in ("that the signers are different", f"which run {RUN.hex()} is", "how large fragments 1 are"):
        assert f"not proven: {words}" in out
    seed = f"/ip4/127.0.0.1/tcp/1/p2p/{B.peer_id}"
    mine, other = (str(Ticket(run, B.peer_id, (seed,))) for run in (RUN, bytes(32)))
    assert "proven: the run is that of the ticket" in said(capsys, "--check", exported, "--ticket", mine)[1]
    status, out, err = said(capsys, "--check", exported, "--ticket", other)
    assert (status, out) == (2, "")
    assert "of another run" in err
    exported.write_text(exported.read_text(encoding="utf-8").replace("tokens_so_far", "tokens_so_fat", 1))
    status, out, err = said(capsys, "--check", exported)
    assert (status, out) == (2, "")
    assert "proves nothing: wrong signature" in err
