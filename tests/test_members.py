"""Runs with members: who is let in, whoever was not invited is refused, and no seed is asked."""

from __future__ import annotations

import asyncio
import re
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootstrap.members import KNOWN, Book, amend, revoke
from p2p_co2.cli.main import main
from p2p_co2.config import ClockConfig, PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, RemoteProtocolError, TicketError, TransportError
from p2p_co2.net.transport.admission import HELLO_CONTEXT, Admission
from p2p_co2.net.transport.libp2p.streams import QuestionClient
from p2p_co2.node.doorkeeper import Doorkeeper
from p2p_co2.node.network import Network
from p2p_co2.node.reporting import PROTOCOL, Observer
from p2p_co2.protocol.reports import MAX_REPORT_BYTES
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.events import LinkLost, PeerJoined, PeerLeft, PeerStarted, RoundCommitted, RoundCounted
from p2p_co2.ticket import Ticket, kept_seeds
from p2p_co2.trainer import connect
from p2p_co2.wire.identity import Identity, unseal
from p2p_co2.wire.members import BANNED, REVOKED_CONTEXT, Members, Pass
from p2p_co2.wire.messages_pb2 import (
    Badge,
    Certificate,
    LinkHello,
    PeerRecord,
    ReportRequest,
    Revocation,
    RunPosition,
)
from p2p_co2.wire.names import words_of
from peers.daemon import _refuse_own_loop
from tests.swarms import Swarm, swarm
from tests.transport_peers import RUN

KEY, US, ANNA = Identity.generate(), Identity.generate(), Identity.generate()
NOW = 1.7e9
SEED = f"/ip4/127.0.0.1/tcp/9/p2p/{KEY.peer_id}"


def door(now: float = NOW) -> Admission:
    admission = Admission(US, RUN, lambda: now)
    admission.members = Members(RUN, KEY.peer_id, True, lambda: now)
    return admission


def issue(key: Identity = KEY, run: bytes = RUN, days: float = 1, watches: bool = False) -> Pass:
    return Pass.issue(key, run, "anna", NOW + days * 86400, watches)


def hello(badge: Badge, now: float = NOW) -> bytes:
    theirs = Admission(ANNA, RUN, lambda: now)
    theirs.members.badge = badge
    return theirs.hello(US.peer_id, b"c")


# ---- the door


def test_a_member_is_admitted_by_what_the_runs_key_signed() -> None:
    badge = issue().badge(RUN, ANNA.peer_id)
    assert door().admit(hello(badge), b"c") == ANNA.peer_id
    at_the_end = NOW + 86400
    assert door(at_the_end).admit(hello(badge, at_the_end), b"c") == ANNA.peer_id


@pytest.mark.parametrize(
    ("badge", "says"),
    [
        (Badge(), "members alone; ask the organiser"),
        (issue(US).badge(RUN, ANNA.peer_id), "wrong signature"),
        (issue(run=bytes(32)).badge(RUN, ANNA.peer_id), "wrong signature"),
        (issue().badge(bytes(32), ANNA.peer_id), "wrong signature"),
        (issue().badge(RUN, US.peer_id), "wrong signature"),
        (replace(issue(), key=bytes(32)).badge(RUN, ANNA.peer_id), "wrong signature"),
        (replace(issue(), certificate=bytes(70_000)).badge(RUN, ANNA.peer_id), "too large|bytes"),
        (issue(watches=True).badge(RUN, ANNA.peer_id), "looking on alone"),
        (issue(days=-1).badge(RUN, ANNA.peer_id), "expired; ask the organiser"),
    ],
)
def test_whoever_is_none_is_refused_before_anything_of_it_is_kept(badge: Badge, says: str) -> None:
    """Nobody's, a stranger's key, another run's, another machine's, without the person's key, too long."""
    admission = door()
    with pytest.raises(RemoteProtocolError, match=says):
        admission.admit(hello(badge), b"c")
    assert admission.links == 0
    assert admission.members.trouble_with(ANNA.peer_id)
    shown = hello(issue().badge(RUN, ANNA.peer_id))
    assert admission.admit(shown, b"c") == ANNA.peer_id
    assert not admission.members.trouble_with(ANNA.peer_id)


def test_a_run_without_members_asks_for_nothing() -> None:
    admission = Admission(US, RUN, lambda: NOW)
    assert admission.admit(hello(Badge(certificate=b"nonsense")), b"c") == ANNA.peer_id
    assert not admission.members.trouble_with(ANNA.peer_id)
    assert b"members" not in RunConfig().canonical_bytes()
    assert RunConfig(members=True).digest() != RunConfig().digest()


def test_a_run_without_members_shows_nothing_not_even_that(tmp_path: Path) -> None:
    network = Network(US, PeerConfig(folder=tmp_path), Ticket(RUN, KEY.peer_id, (SEED,)))
    said: list[bool] = []

    async def take(one: PeerRecord | RunPosition) -> None:
        said.append(one.HasField("badge"))

    async def record() -> PeerRecord:
        return PeerRecord()

    network._reach = SimpleNamespace(record=record, advice="")  # type: ignore[assignment]
    network.discovery = SimpleNamespace(publish_self=take, publish_position=take)  # type: ignore[assignment]
    for badge in (None, Badge()):
        network.door.members.badge = badge
        network._done_at.clear()
        asyncio.run(network.publish_self())
        asyncio.run(network.publish_position(1.0, [1]))
    assert said == [False, False, True, True]
    sealed_hello = Admission(US, RUN, lambda: NOW).hello(ANNA.peer_id, b"c")
    assert not LinkHello.FromString(unseal(HELLO_CONTEXT, sealed_hello)[1]).HasField("badge")


def test_what_has_expired_is_heard_no_more_and_what_it_said_before_counts() -> None:
    now = [NOW]
    members = Members(RUN, KEY.peer_id, True, lambda: now[0])
    badge = issue().badge(RUN, ANNA.peer_id)
    members.check(ANNA.peer_id, badge)
    now[0] += 2 * 86400
    assert members.trouble_with(ANNA.peer_id)
    with pytest.raises(RemoteProtocolError, match="expired"):
        members.check(ANNA.peer_id, badge)
    members.check(ANNA.peer_id, badge, at=NOW)


def test_only_what_lets_a_machine_in_keeps_it_in() -> None:
    """Not a ticket for looking on that it shows besides, nor one that it wrote with long ago."""
    now = [NOW]
    members = Members(RUN, KEY.peer_id, True, lambda: now[0])
    me, bob = ANNA.peer_id, issue(days=9)
    watches = issue(days=9, watches=True).badge(RUN, me)
    members.check(me, bob.badge(RUN, me))
    assert members.admits(RunPosition(peer=me, badge=issue(days=-1).badge(RUN, me)), NOW - 2 * 86400)
    assert not members.trouble_with(me)
    members.check(me, watches, looks=True)
    members.take(sealed(1, person_of(bob)))
    members.check(me, watches, looks=True)
    assert "revoked" in members.trouble_with(me)
    assert members.trouble_with(US.peer_id)
    members.check(US.peer_id, issue(watches=True).badge(RUN, US.peer_id), looks=True)
    assert members.trouble_with(US.peer_id)


def test_many_machines_of_one_member_put_out_nobody_who_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.wire.members.MAX_PEERS", 3)
    members = Members(RUN, KEY.peer_id, True, lambda: NOW)
    anna, bob = issue(), issue()
    members.check(ANNA.peer_id, anna.badge(RUN, ANNA.peer_id))
    for _ in range(3):
        for peer in (Identity.generate().peer_id for _ in range(3)):  # as many as one look into the DHT gives
            members.check(peer, bob.badge(RUN, peer))
        assert not members.trouble_with(ANNA.peer_id)


# ---- the organiser's book


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def organiser(folder: Path) -> Path:
    """As a seed leaves it."""
    key = Identity.load_or_create(folder / "identity")
    (folder / "ticket").write_text(
        str(Ticket(RUN, key.peer_id, (f"/ip4/127.0.0.1/tcp/9/p2p/{key.peer_id}",)))
    )
    (folder / "members").touch(0o600)
    return folder


def test_a_ticket_is_made_offline_for_one_person_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = organiser(tmp_path)
    for options in (["anna"], ["bob", "--watch", "--days", "0.5"]):
        command("invite", *options, "--folder", str(folder))
    printed = capsys.readouterr()
    anna, bob = map(Ticket.parse, printed.out.split())
    assert "secret" in printed.err
    told = [ticket.certificate() for ticket in (anna, bob)]
    assert [(one.name, one.watches) for one in told if one] == [("anna", False), ("bob", True)]
    assert told[0]
    assert told[0].expires_at == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert anna.open_part == Ticket.parse((folder / "ticket").read_text())
    assert anna.admits
    assert repr(anna.admits.key) not in repr(anna)
    assert stat.S_IMODE((folder / "members").stat().st_mode) == 0o600
    assert anna.admits.key.hex() not in (folder / "members").read_text()
    command("members", "--folder", str(folder))
    assert re.findall(r"(\w+): until [\d-]+(.*)", capsys.readouterr().out) == [
        ("anna", ""),
        ("bob", ", looks on alone"),
    ]
    with pytest.raises(TicketError, match="looking on alone; look on with p2p-co2 watch"):
        connect(str(bob), PeerConfig(folder=tmp_path / "bob"), lambda _: None)


def test_a_members_ticket_is_not_said_where_join_refuses_a_program_of_its_own() -> None:
    run = run_of_members()
    for members, says in ((True, "P2P_CO2_TICKET=TICKET python"), (False, "P2P_CO2_TICKET=p2pco2-x python")):
        with pytest.raises(ConfigError, match=says) as told:
            _refuse_own_loop(run.model_copy(update={"members": members}), "p2pco2-x")
        assert ("p2pco2-x" in str(told.value)) is not members


def test_what_cannot_be_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="members = true"):
        Book(tmp_path)
    assert not (tmp_path / "identity").exists()
    book = Book(organiser(tmp_path))
    for name, days, says in (("a~b", 1.0, "NAME"), ("anna", float("nan"), "--days"), ("anna", 1e9, "--days")):
        with pytest.raises(ConfigError, match=says):
            book.invite(name, days, False)
    (tmp_path / "revoked").write_bytes(sealed(1, key=book.key, run=bytes(32)))
    with pytest.raises(ConfigError, match=r"of another run.*; move it away"):
        book.revocation()
    book.key = KEY  # where "identity" was lost, a new one was made
    with pytest.raises(TicketError, match="not signed by the run's key"):
        book.invite("anna", 1, False)
    assert not book.certificates()
    (tmp_path / "members").write_text("anna\n")
    with pytest.raises(ConfigError, match="take it out"):
        book.certificates()


# ---- revoked


def sealed(number: int, *persons: bytes, key: Identity = KEY, run: bytes = RUN) -> bytes:
    said = Revocation(run=run, number=number, persons=persons)
    return key.seal(REVOKED_CONTEXT, said.SerializeToString())


def person_of(admits: Pass) -> bytes:
    return Certificate.FromString(admits.certificate).person


def test_the_newest_word_of_the_runs_key_holds_and_who_brings_it_does_not_matter() -> None:
    members = door().members
    told: list[str] = []
    members.changed.append(lambda: told.append("changed"))
    anna, bob = issue(), issue()
    for admits, identity in ((anna, ANNA), (bob, US)):
        members.check(identity.peer_id, admits.badge(RUN, identity.peer_id))
    members.take(sealed(2, person_of(anna)))
    assert members.trouble_with(ANNA.peer_id)
    assert not members.trouble_with(US.peer_id)
    with pytest.raises(RemoteProtocolError, match="revoked by the organiser"):
        members.check(ANNA.peer_id, anna.badge(RUN, ANNA.peer_id), looks=True)
    for stale in (sealed(2, person_of(anna)), sealed(1), sealed(2, person_of(bob))):
        members.take(stale)
    wrong = (
        sealed(3, key=US), sealed(3, run=bytes(32)), sealed(3, b"short"), sealed(3, *[bytes(32)] * 1025),
        b"x" * 50_000, issue().by_run,
    )  # fmt: skip
    for forged in wrong:
        with pytest.raises(RemoteProtocolError):
            members.take(forged)
    assert told == ["changed"]
    members.take(sealed(3, person_of(bob)))
    assert not members.trouble_with(ANNA.peer_id)
    assert members.trouble_with(US.peer_id)


def test_the_book_revokes_every_ticket_of_a_name_and_forgets_what_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Book(organiser(tmp_path))
    (first, second), _ = [book.invite("anna", days, False) for days in (1, 40)], book.invite("bob", 1, False)
    with pytest.raises(ConfigError, match="nobody here is called carol"):
        book.revoke("carol")
    with pytest.raises(TransportError, match=r"anna is revoked, but no peer was told: .*; run this again"):
        revoke(book, "anna", print)
    last = book.revocation()
    persons = [person_of(one.admits) for one in (first, second) if one.admits]
    assert sorted(last.persons) == sorted(persons)
    command("members", "--folder", str(tmp_path))
    assert re.findall(r": (\w+)", capsys.readouterr().out) == ["revoked", "revoked", "until"]
    now = time.time()
    later = now + 3 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    book.invite("bob", 40, False)
    (tmp_path / "members").write_text("".join((tmp_path / "members").read_text().splitlines(True)[2:]))
    book.revoke("bob")
    newest = book.revocation()
    assert newest.number > last.number
    assert set(persons) < set(newest.persons)  # what the first wrote stands in the DHT
    bob = book.certificates()[0].person  # of one day
    later = now + 33 * 86400
    book.revoke("bob")
    assert set(newest.persons) - set(book.revocation().persons) == {bob}


def test_who_is_revoked_while_a_link_is_ended_is_seen_to_at_once(tmp_path: Path) -> None:
    keeper = Doorkeeper(US.peer_id, Ticket(RUN, KEY.peer_id, (SEED,)), tmp_path, RunConfig(members=True))
    anna, bob = issue(days=1e4), issue(days=1e4)
    other = Identity.generate().peer_id
    for admits, peer in ((anna, ANNA.peer_id), (bob, other), (issue(days=1e4), US.peer_id)):
        keeper.members.check(peer, admits.badge(RUN, peer))
    links: list[SimpleNamespace] = []

    async def drop_anna(why: str) -> None:
        links.clear()
        keeper.members.take(sealed(2, person_of(anna), person_of(bob)))

    async def keep() -> None:
        links.append(SimpleNamespace(peer=ANNA.peer_id, drop=drop_anna))
        keeping = asyncio.create_task(keeper.keep([SimpleNamespace(links=links)]))  # type: ignore[list-item]
        await asyncio.sleep(0)
        keeper.members.take(sealed(1, person_of(anna)))
        await asyncio.sleep(0.2)
        keeping.cancel()

    asyncio.run(keep())
    assert (tmp_path / "revoked").read_bytes() == keeper.members.sealed


# ---- among processes


def run_of_members(round_s: float = 3.0, rounds: int = 0) -> RunConfig:
    clock = ClockConfig(mode="time", round_s=round_s, rounds=rounds)
    return RunConfig(name="members", recipe="own-loop", fragments=2, clock=clock, members=True)


def joins(swarm: Swarm, name: str, *arguments: str, seeds: tuple[str, ...] = ()) -> None:
    """``name`` trains by a ticket of that name's own, by way of the seed or of ``seeds``."""
    ticket = Book(swarm.folder / "seed").invite(name, 1, False)
    ticket = replace(ticket, seeds=seeds or ticket.seeds)
    script = str(Path(__file__).with_name("swarm_peer.py"))
    swarm.start(name, [sys.executable, script, str(ticket), str(swarm.folder / name), *arguments])


@pytest.mark.swarm
def test_a_member_trains_and_a_stranger_with_the_open_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm(tmp_path, run_of_members()) as ours:
        assert "admits nobody" in ours.log("seed")
        joins(ours, "anna")
        joins(ours, "bob")
        ours.wait_for("anna", RoundCommitted, 2)
        opened = Ticket.parse((tmp_path / "anna" / "ticket").read_text())
        assert opened.admits is not None
        assert stat.S_IMODE((tmp_path / "anna" / "ticket").stat().st_mode) == 0o600
        with pytest.raises(TicketError, match="admits nobody to the run: this run takes members alone"):
            connect(str(opened.open_part), PeerConfig(folder=tmp_path / "honest"), lambda _: None)
        eve = Book(tmp_path / "seed").invite("eve", 1, True)
        for ticket, state in ((eve, "2 of 2 peers answer"), (opened.open_part, "takes members alone")):
            observer = Observer(str(ticket), tmp_path / state)
            seen_at = time.monotonic() + 60
            while state not in observer.state.words:
                assert time.monotonic() < seen_at, observer.state
                time.sleep(0.1)
            assert observer.invitation() == str(ticket.open_part)
            observer.close()
        # One that does not refuse itself is refused by each member, and listed by none.
        monkeypatch.setattr(Doorkeeper, "enter", lambda self: None)
        refused = asyncio.run(dialled(opened.open_part, tmp_path / "stranger"))
        assert len(refused) == 4
        assert all("this run takes members alone" in cause or "hung up" in cause for cause in refused)
        joined = {event.other for event in ours.events("anna") if isinstance(event, PeerJoined)}
        assert len(joined) == 1


@pytest.mark.swarm
def test_a_peers_owner_bans_another_by_name_and_lets_it_come_back(tmp_path: Path) -> None:
    """In a run without members, too; others go on with it."""
    run = run_of_members().model_copy(update={"members": False})
    with swarm(tmp_path, run) as ours:
        for name in ("anna", "bob", "carol"):
            ours.start_peer(name, "--min-peers", "3")
        bob = ours.wait_for("bob", PeerStarted)[0].peer
        ours.wait_for("anna", RoundCommitted)
        assert main(["ban", "nobody", str(tmp_path / "anna")]) == 2
        command("ban", words_of(bob), str(tmp_path / "anna"))
        (left,) = ours.wait_for("anna", PeerLeft)
        assert (left.other, left.reason) == (bob, BANNED)  # type: ignore[attr-defined]
        while not any(BANNED in event.reason for event in ours.events("bob") if isinstance(event, LinkLost)):
            time.sleep(0.2)
        assert not [event for event in ours.events("carol") if isinstance(event, PeerLeft)]
        command("ban", bob, str(tmp_path / "anna"), "--undo")
        ours.wait_for("anna", PeerJoined, 3)


async def dialled(ticket: Ticket, folder: Path) -> list[str]:
    """What a stranger hears that dials all peers of a run, and asks each for its report."""
    network = await Network.open(ticket, PeerConfig(folder=folder, upnp=False), lambda *_: None)
    causes = []
    try:
        await network.start_carriers(nothing, lambda *_: None)
        await network.publish_self()
        asking = QuestionClient(network.p2p, PROTOCOL, MAX_REPORT_BYTES)
        for record in await network.find_peers():
            with pytest.raises(TransportError) as told:
                await network.carriers[0].connect(record)
            causes.append(str(told.value))
            question = ReportRequest(run=ticket.run).SerializeToString()
            with pytest.raises(TransportError) as told:
                await asking.ask(record.peer, record.maddrs, question, 10.0)  # type: ignore[arg-type]
            causes.append(str(told.value))
        await asyncio.sleep(11.0)  # they look for peers meanwhile
        await asking.close()
    finally:
        await network.close()
    return causes


async def nothing(*_: object) -> None: ...


@pytest.mark.swarm
def test_who_is_revoked_counts_no_more_after_a_round_though_no_seed_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer is told, and tells the rest. A newcomer does not let it in again."""
    round_s = 4.0
    with swarm(tmp_path, run_of_members(round_s)) as ours:
        for name in ("anna", "bob", "carol"):
            joins(ours, name, "--min-peers", "3")
        carol = ours.wait_for("carol", PeerStarted)[0].peer
        book = Book(tmp_path / "seed")
        while not counted(ours, "anna", carol) or not kept_seeds(book.folder, book.ticket.run, KNOWN):
            time.sleep(0.2)
        ours.processes["seed"].kill()
        find_peers = Network.find_peers

        async def find_one(network: Network) -> list[PeerRecord]:
            return (await find_peers(network))[:1]

        monkeypatch.setattr(Network, "find_peers", find_one)
        said: list[str] = []
        revoke(book, "carol", said.append)
        revoked_at = time.time()
        assert re.fullmatch("carol is revoked; 1 peers were told.*", said[0])
        time.sleep(3 * round_s)
        for name in ("anna", "bob"):
            events = ours.events(name)
            left = [event.at for event in events if isinstance(event, PeerLeft) and event.other == carol]
            assert len(left) == 1
            assert left[0] <= revoked_at + round_s
            assert max(counted(ours, name, carol)) <= revoked_at + round_s
            others = [event.at for event in events if isinstance(event, RoundCounted)]
            assert max(others) > revoked_at + round_s  # the rest goes on
        lost = [event.reason for event in ours.events("carol") if isinstance(event, LinkLost)]
        assert any("revoked" in reason for reason in lost), lost
        first = max(made(ours, "anna")) + 6
        amend(book, "outer.lr", "0.25", first, said.append)
        assert said[1] == f"from round {first} on outer.lr is 0.25; 1 peers were told, and tell the others"
        ours.processes["bob"].kill()
        ours.processes["bob"].wait()
        joins(ours, "dave", seeds=kept_seeds(book.folder, book.ticket.run, KNOWN))
        ours.wait_for("dave", RoundCommitted, 2)
        assert (tmp_path / "dave" / "revoked").read_bytes() == (tmp_path / "seed" / "revoked").read_bytes()
        for name in ("anna", "dave"):
            assert max(counted(ours, name, carol), default=0.0) <= revoked_at + round_s
            told = [event.text for event in ours.events(name) if isinstance(event, ev.Warned)]
            assert f"from round {first} on outer.lr is 0.25, says the run's organiser" in told
        while max(made(ours, "dave"), default=0) <= first:  # together, so the bits are the same
            time.sleep(0.2)


def made(ours: Swarm, name: str) -> list[int]:
    """Rounds that ``name`` committed with another."""
    events = ours.events(name)
    return [event.round for event in events if isinstance(event, RoundCommitted) and event.group_size > 1]


def counted(ours: Swarm, name: str, peer: str) -> list[float]:
    """When a mean with work of ``peer`` was committed, as ``name`` says."""
    events = ours.events(name)
    return [event.at for event in events if isinstance(event, RoundCounted) and event.weights.get(peer)]
