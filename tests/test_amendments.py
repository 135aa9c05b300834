"""What the organiser amends while a run goes on: it holds from its round, on all peers alike."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import p2p_co2.trainer.ledger.fragment_state as ledgers
from bootstrap.members import Book, amend, amendment
from monitoring.known import Known
from monitoring.swarm import swarm_facts
from p2p_co2.cli.main import main
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import ConfigError, RemoteProtocolError, RunOver, TransportError
from p2p_co2.node.doorkeeper import Doorkeeper
from p2p_co2.node.reporting import nobody_answers
from p2p_co2.swarm.joining import _progress_printer
from p2p_co2.telemetry.events import CaughtUp, RoundCounted, Warned
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.arrival import Beginning
from p2p_co2.wire.envelope import opened
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.members import REVOKED_CONTEXT, Members
from p2p_co2.wire.messages_pb2 import Amendment, Revocation, Revoked, RunPosition
from p2p_co2.wire.schedule import WorkAccount
from p2p_co2.wire.terms import MAX_AMENDMENTS, RunTerms, amended
from tests.event_samples import fold, sample, started
from tests.fuzz.world import RUN, World, run_virtual
from tests.test_fragment_state import Simulated, part, plain
from tests.test_members import KEY, command, organiser

STRANGER = Identity.generate()


def lr(round_: int, value: str = "0.25") -> Amendment:
    return Amendment(round=round_, setting="outer.lr", value=value)


def rounds(round_: int, value: int) -> Amendment:
    return Amendment(round=round_, setting="clock.rounds", value=str(value))


def sealed(number: int, *said: Amendment, key: Identity = KEY, run: RunConfig = RUN) -> bytes:
    content = Revocation(run=run.digest(), number=number, amendments=said).SerializeToString()
    return key.seal(REVOKED_CONTEXT, content)


def members() -> Members:  # of a run without members
    return Members(RUN.digest(), KEY.peer_id, settings=RUN)


# ---- by hand


def test_each_round_has_the_settings_that_were_said_for_it_in_whatever_order() -> None:
    run = RunConfig(clock=ClockConfig(rounds=100))
    terms = RunTerms(run)
    clip = Amendment(round=50, setting="outer.clip", value="none")
    terms.amend([lr(50), rounds(90, 300), lr(20, "0.5"), clip])
    assert [terms.at(at).outer.lr for at in (0, 19.9, 20, 49, 50, 1e9)] == [0.7, 0.7, 0.5, 0.5, 0.25, 0.25]
    assert terms.at(50).outer.clip == "none"
    assert [terms.rounds(at) for at in (0.0, 89.9, 90.0, 299.0)] == [100, 100, 300, 300]
    assert terms.news[0] == "from round 20 on outer.lr is 0.5, says the run's organiser"
    terms.news.clear()
    terms.amend([lr(20, "0.5")])  # the newest word holds, all of it
    assert terms.at(50).outer.lr == 0.5
    assert not terms.news


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("outer.lr", "11", "at most 10"),
        ("outer.momentum", "nan", "finite"),
        ("outer.clip", "rmsprop", "none"),
        ("clock.rounds", "1.5", "whole number"),
        ("clock.rounds", "-1", "at least 0"),
        ("clock.rounds", "9" * 30, "at most"),  # peers could not tell it each other
        *((one, "2", r"fixed for the whole run; what may be amended: clock.rounds, outer.lr, ") for one in
          ("clock.round_s", "recipe", "codec.name", "outer", "outer.rule", "members", "salt", "", "x.y.z")),
    ],
)  # fmt: skip
def test_what_is_fixed_or_not_allowed_is_refused_at_the_command_and_on_the_wire(
    setting: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=says):
        amended(RUN, setting, value)
    assert main(["amend", f"{setting}={value}", "--folder", str(organiser(tmp_path))]) == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))
    known = members()
    known.take(sealed(1, lr(9, "0.5")))
    with pytest.raises(RemoteProtocolError):
        known.take(sealed(2, lr(7), Amendment(round=9, setting=setting, value=value)))
    assert known.terms.at(9).outer.lr == 0.5


@pytest.mark.parametrize("rule", ["keep", "co2", "eager"])
def test_where_a_rate_changes_a_peer_that_has_learned_nothing_offers_nothing(rule: str) -> None:
    """Its live parameters, and what of the steps they have not met yet, are those of that rate."""
    peer = Simulated("me", plain(rule), torch.zeros(128))
    peer.ledger._terms.amend([lr(3), Amendment(round=4, setting="outer.momentum", value="0.5")])
    for made in range(1, 7):
        assert not torch.frombuffer(bytearray(peer.offer()), dtype=torch.float32).any()
        mean = torch.full((128,), float(made)).numpy().tobytes()
        peer.commit(mean, [part(0, 1, peer, "other")])


def test_what_is_forged_of_another_run_older_or_too_much_changes_nothing() -> None:
    known = members()
    known.take(sealed(5, lr(9)))
    known.take(sealed(4, lr(9, "0.5")))
    known.take(sealed(5, lr(9, "0.5")))
    for wrong in (
        sealed(6, lr(9, "0.5"), key=STRANGER), sealed(6, lr(9, "0.5"), run=RunConfig()), sealed(6, lr(0)),
        sealed(6, lr(1 << 60)), sealed(6, lr(9, "0." + "1" * 40)), sealed(6, lr(9, "")),
        sealed(6, *(lr(9 + number) for number in range(MAX_AMENDMENTS + 1))), b"x" * 50_000,
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            known.take(wrong)
    assert known.terms.at(9).outer.lr == 0.25
    with pytest.raises(RemoteProtocolError):
        Members(RUN.digest(), settings=RUN).take(
            sealed(1, lr(9))
        )  # it knows no key of the run: it hears nobody


# ---- among peers that train


def taken_steps(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[float]]:
    """By round, the rates with which outer steps were taken."""
    rates = defaultdict[int, set[float]](set)
    step = ledgers.outer.step

    def noted(config: Any, state: Any, *given: Any, **named: Any) -> Any:
        rates[state.version + 1].add(config.lr)
        return step(config, state, *given, **named)

    monkeypatch.setattr(ledgers.outer, "step", noted)
    return rates


def hears(one: Any) -> Members:
    """It knows the run's key."""
    known: Members = one.node.environment.members
    known._run_key = KEY.peer_id
    return known


def test_a_rate_changes_at_its_round_on_all_peers_and_bits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is told, and tells the others."""
    rates = taken_steps(monkeypatch)

    async def play() -> None:
        world = World("a", "b", "c")
        told, *_ = map(hears, world.trainers)
        world.start()
        await world.train(5.0)
        newest = max(max(versions) for versions in world.versions())
        at = newest + 4
        told.take(sealed(1, lr(at)))
        while min(min(versions) for versions in world.versions()) < at + 3:
            await world.train(0.5)
            world.check_agreed()
        assert all(rates[made] == {0.7} for made in range(newest, at))
        assert all(rates[made] == {0.25} for made in range(at, at + 4))
        for one in world.trainers:
            words = [event.text for event in one.events if isinstance(event, Warned)]
            assert words == [f"from round {at} on outer.lr is 0.25, says the run's organiser"]
            assert not one.refused
            assert not any(isinstance(event, CaughtUp) and event.to_version >= newest for event in one.events)
        await world.close()

    run_virtual(play())


def test_who_hears_too_late_falls_behind_and_takes_over_what_the_others_have() -> None:
    """It costs a round or two of its work, and no more than that."""

    async def play() -> None:
        world = World("a", "b", "c")
        told, *_ = map(hears, world.trainers)
        late = world.trainers[2]

        def tap(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
            return receiver != late.me or not isinstance(opened(data, RUN.digest()).body, Revoked)

        world.tap = tap
        world.start()
        await world.train(5.0)
        at = max(max(versions) for versions in world.versions()) + 2
        told.take(sealed(1, lr(at)))
        while late.node.agreed[0].version < at:
            await world.train(0.1)
        assert late.terms.at(at).outer.lr == 0.7
        await world.train(1.0)
        hears(late).take(sealed(1, lr(at)))
        heard_at = max(one.version for one in late.node.agreed)
        await world.train(8.0)
        world.check_agreed()
        assert any(isinstance(event, CaughtUp) and event.to_version >= at for event in late.events)
        counted = {
            event.round for event in world.trainers[0].events
            if isinstance(event, RoundCounted) and event.weights.get(late.me) and event.round > heard_at
        }  # fmt: skip
        assert min(counted) <= heard_at + 3
        assert len(counted) >= 3
        await world.close()

    run_virtual(play())


def test_a_peer_that_comes_back_knows_what_it_heard_and_hears_what_it_missed(tmp_path: Path) -> None:
    ticket = Ticket(RUN.digest(), KEY.peer_id, (f"/ip4/127.0.0.1/tcp/9/p2p/{KEY.peer_id}",))
    (tmp_path / "revoked").write_bytes(sealed(1, lr(9)))
    back = Doorkeeper(STRANGER.peer_id, ticket, tmp_path, RUN)
    back.enter()
    assert back.members.terms.at(20).outer.lr == 0.25
    back.members.take(sealed(2, lr(9), lr(20, "0.5")))
    assert [back.members.terms.at(at).outer.lr for at in (8, 9, 20)] == [0.7, 0.25, 0.5]


def test_where_the_run_ends_is_asked_at_each_position() -> None:
    run = RunConfig(clock=ClockConfig(rounds=60))
    terms = RunTerms(run)
    account = WorkAccount(run, 0, [0], terms)
    nobody = SimpleNamespace(run_position=lambda: RunPosition(position=60.0), is_listed_empty=lambda: True)
    beginning: Any = Beginning(nobody, terms.rounds, None, False)  # type: ignore[arg-type]
    assert account.is_over(60.0)
    with pytest.raises(RunOver):
        beginning.refuse_if_over()
    terms.amend([rounds(50, 300)])
    assert [account.is_over(at) for at in (60.0, 299.9, 300.0)] == [False, False, True]
    beginning.refuse_if_over()
    nobody.run_position = lambda: RunPosition(position=300.0, rounds=300)
    with pytest.raises(RunOver, match="round 300"):  # also for a newcomer, which has not heard
        Beginning(nobody, RunTerms(run).rounds, None, False).refuse_if_over()  # type: ignore[arg-type]
    nobody.run_position = lambda: RunPosition(position=5.0, rounds=1)  # a stranger's word
    for ends, resumed_at in ((60, 50.0), (0, 50.0), (0, None)):
        known = RunTerms(RunConfig(clock=ClockConfig(rounds=ends)))
        at_home = Beginning(nobody, known.rounds, resumed_at, False)  # type: ignore[arg-type]
        assert not at_home._end(nobody.run_position())
    nobody.run_position = lambda: RunPosition(position=300.0, rounds=300)
    ended = nobody_answers(0, 0, nobody.run_position(), 60)
    assert swarm_facts(Known(fold([]), 3.0, run=run, state=ended)).rounds_total == 300
    terms.amend([rounds(50, 0)])
    assert not account.is_over(1e6)


def test_the_amended_number_of_rounds_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(clock=ClockConfig(rounds=60, round_s=10.0))
    hear = _progress_printer(run, Path("x"))
    says = partial(sample, "progress", at=2.0, position=57.0, loss=math.nan)
    events = [says(peer=peer, rounds=ends) for peer, ends in (("a", 300), ("b", 300), ("c", 60))]
    for at in (0.0, 20.0):
        hear(dataclasses.replace(events[0], at=at))
    assert "round 57.0 of 300, 40:30 left" in capsys.readouterr().err
    assert swarm_facts(Known(fold([*map(started, "abc"), *events]), 3.0, run=run)).rounds_total == 300
    earlier = [says(peer=peer) for peer in "abc"]  # of an earlier version
    assert swarm_facts(Known(fold([*map(started, "abc"), *earlier]), 3.0, run=run)).rounds_total == 60


# ---- the organiser's command


def test_the_round_is_far_enough_ahead_and_before_the_end() -> None:
    run = RunConfig(clock=ClockConfig(rounds=100, round_s=30.0))
    none = Revocation()
    assert amendment(none, run, 12.5, "outer.lr", "5e-1", None) == lr(23, "0.5")
    in_short_rounds = run.model_copy(update={"clock": ClockConfig(rounds=100, round_s=2.0)})
    assert amendment(none, in_short_rounds, 12.5, "outer.lr", "0.5", None).round == 75
    assert amendment(none, run, 12.5, "outer.lr", "0.5", 15) == lr(15, "0.5")
    too_early, too_late = (14, 12.5, "name 15 or later"), (100, 9.0, "ends at round 100")
    for first, newest, says in (too_early, too_late, (None, 95.0, "100"), (1 << 60, 9.0, "or later")):
        with pytest.raises(ConfigError, match=says):
            amendment(none, run, newest, "outer.lr", "0.5", first)
    with pytest.raises(ConfigError, match="name more rounds than 30"):
        amendment(none, run, 9.0, "clock.rounds", "30", 30)
    assert (
        amendment(Revocation(amendments=[rounds(90, 300)]), run, 120.0, "outer.lr", "0.5", None).round == 130
    )


def test_the_book_keeps_what_was_amended_beside_who_was_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = organiser(tmp_path)
    book = Book(folder)
    book.invite("anna", 1, False)
    for said in (lr(20), rounds(30, 300), lr(20, "0.5")):
        book.keep(book.amend(said))
    book.revoke("anna")
    assert list(book.revocation().amendments) == [rounds(30, 300), lr(20, "0.5")]
    command("amend", "--folder", str(folder))
    assert capsys.readouterr().out.splitlines()[1:] == ["from round 30 on: clock.rounds = 300"]
    book.keep(book.amend(lr(40)))
    before = book.revocation()
    assert len(before.persons) == 1
    with pytest.raises(TransportError, match="nothing is amended, for no peer was told"):
        amend(book, "outer.lr", "0.25", 50, print)
    assert book.revocation() == before
    for number in range(MAX_AMENDMENTS - 3):
        book.keep(book.amend(lr(100 + number)))
    with pytest.raises(ConfigError, match=f"at most {MAX_AMENDMENTS}"):
        book.amend(lr(99))


def test_a_run_without_members_is_amended_from_its_first_seeds_folder(tmp_path: Path) -> None:
    folder = organiser(tmp_path / "first")
    (folder / "members").unlink()
    assert not Book(folder, of_any=True).revocation().amendments
    with pytest.raises(ConfigError, match="members = true"):
        Book(folder)
    with pytest.raises(ConfigError, match="has no file ticket"):
        Book(tmp_path, of_any=True)
    (tmp_path / "ticket").write_bytes((folder / "ticket").read_bytes())  # as in that of a further seed
    with pytest.raises(ConfigError, match="not of the run's first seed"):
        Book(tmp_path, of_any=True)
