"""node.apart: who goes over to the others' state, and who stays; then whole swarms in which peers sleep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.apart import PAST_KEPT, STANDING_S, STRONGEST_AFTER_S, TAKING_S, TURN_AFTER_S, Apart, Camp
from p2p_co2.node.catching import Catching
from p2p_co2.node.last_words import Held
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.majority import Majority
from p2p_co2.protocol.catchup import ROUND, STATE, CatchUp, Fetched, Goal, Shape, chunk_digest
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Fetch, Status
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.simnet.inspection import HEAL_ROUNDS
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.telemetry.events import CaughtUp, Event, RoundCommitted, Warned
from tests.round_network import RUN, make_identity

ME = PeerId("me")
TRAINS, FINISHES, RESTS, JOINS = Status.TRAINING, Status.DRAINING, Status.PAUSED, Status.JOINING


def state(version: int, history: str) -> bytes:
    return f"{history}{version}".encode().ljust(32, b".")


def said(version: int, history: str, phase: Status.Phase = TRAINS) -> SimpleNamespace:
    """A live peer's last heartbeat: it is at ``version`` of a history named by a letter."""
    return SimpleNamespace(
        status=Status(phase=phase), versions=(version,), digests=(state(version, history),)
    )


def one_that_made(
    alone: int, together: int, others: dict[str, SimpleNamespace], *,
    phase: Status.Phase = TRAINS, unheard: int = 0, given: int = 99, heard: int = -1,
) -> Apart:  # fmt: skip
    """A peer that made ``together`` rounds with another, and ``alone`` after them."""
    live = {PeerId(name): info for name, info in others.items()}
    node = SimpleNamespace(
        me=ME,
        agreed=[AgreedVersion(0, state(0, "a"))],
        membership=SimpleNamespace(live=live, unheard=unheard, revision=0),
        progress=SimpleNamespace(local=SimpleNamespace(phase=phase)),
        catchup=SimpleNamespace(given=lambda fragment: given),
        rounds=SimpleNamespace(given=lambda fragment: heard),
    )
    apart = Apart(node, Majority(node))  # type: ignore[arg-type]
    for version in range(1, together + alone + 1):
        agreed = AgreedVersion(version, state(version, "a"))
        apart.moved(0, agreed, [ME] if version > together else [ME, PeerId("other")])
        node.agreed[0] = agreed
    return apart


@pytest.mark.parametrize(
    ("others", "unheard", "goes_to"),
    [
        ({"b": said(3, "b"), "c": said(3, "b")}, 0, 3),  # they made the same versions anew
        ({"b": said(4, "b"), "c": said(3, "b"), "d": said(3, "b")}, 0, 3),  # what two hold
        ({"b": said(4, "b"), "c": said(4, "b"), "d": said(3, "b")}, 0, 4),
        ({n: said(4, "b") for n in "bcdef"} | {n: said(5, "z") for n in "yz"}, 0, 4),  # two liars
        ({"b": said(4, "b"), "c": said(3, "b")}, 0, None),  # no two hold one state
        ({"b": said(3, "b"), "c": said(8, "a")}, 0, None),  # one against two
        ({"b": said(3, "b"), "c": said(3, "b"), "d": said(8, "a"), "e": said(8, "a")}, 0, None),  # 2 liars
        ({"b": said(3, "b"), "c": said(3, "b")}, 1, None),  # the DHT lists more than are heard
        ({"b": said(3, "b"), "c": said(3, "b", RESTS)}, 0, None),
        ({"b": said(3, "b"), "c": said(3, "b", JOINS)}, 0, None),
        ({"b": said(9, "b"), "c": said(9, "b")}, 0, None),  # they are ahead: catching up sees to that
    ],
)  # fmt: skip
def test_one_that_made_versions_alone_goes_where_most_others_are(
    others: dict[str, SimpleNamespace], unheard: int, goes_to: int | None
) -> None:
    camp = one_that_made(6, 2, others, unheard=unheard).camp(0)
    if goes_to is None:
        assert camp is None
        return
    assert camp is not None
    assert (camp.version, camp.digest, camp.wait_s) == (goes_to, state(goes_to, "b"), TURN_AFTER_S)
    assert camp.holders == tuple(sorted(name for name in others if others[name].versions == (goes_to,)))


def test_who_stands_where_lonely_rounds_began_is_waited_for_and_who_helped_to_make_them_is_not_left() -> None:
    behind = {"b": said(2, "a"), "c": said(2, "a")}
    camp = one_that_made(6, 2, behind).camp(0)
    assert camp is not None
    assert (camp.version, camp.wait_s) == (2, TAKING_S)  # they may be loading them, over a slow way
    camp = one_that_made(6, 2, behind, given=2).camp(0)
    assert camp is not None
    assert (camp.version, camp.wait_s) == (2, STANDING_S)
    liars = {"d": said(2, "z"), "e": said(2, "z")}
    camp = one_that_made(6, 2, behind | liars).camp(0)
    assert camp is not None
    assert camp.digest == state(2, "a")  # what is of our own past goes before what two say
    assert one_that_made(5, 3, behind).camp(0) is None  # others made version 3: it can be had of them


def test_of_a_past_that_is_not_known_nothing_follows() -> None:
    others = {"b": said(3, "b"), "c": said(3, "b")}
    apart = one_that_made(6, 2, others)
    apart.moved(0, AgreedVersion(8, state(8, "x")), None)  # somebody's whole state
    assert apart.camp(0) is None
    apart = one_that_made(PAST_KEPT + 4, 2, others)
    assert apart.camp(0) is None
    assert len(apart._past[0]) == PAST_KEPT


@pytest.mark.parametrize(
    ("version", "history", "given_up"),
    [
        (3, "b", 6),  # made anew by the others
        (2, "a", 6),  # where our lonely rounds began
        (5, "a", 3),  # somebody fetched three of them
        (8, "b", 6),
        (9, "b", 0),  # ahead of us: it may hold all that we made
    ],
)
def test_what_was_made_alone_is_counted_where_it_is_given_up(
    version: int, history: str, given_up: int
) -> None:
    apart = one_that_made(6, 2, {})
    words = apart.loss(0, Camp(version, state(version, history), (), TURN_AFTER_S))
    assert words == "what only our history holds is lost" + (
        f", {given_up} rounds of this peer alone among it" if given_up else ""
    )
    apart.moved(0, AgreedVersion(version, state(version, history)), None)
    assert apart.given_up == {0: given_up}
    others_lack_them = one_that_made(6, 2, {}, given=2)
    words = others_lack_them.loss(0, Camp(2, state(2, "a"), (), TURN_AFTER_S))
    kept = "the work of 6 rounds of this peer alone is kept for our next offer"
    assert words == f"what only our history holds is lost; {kept}"
    of_two = one_that_made(0, 8, {})
    of_two.moved(0, AgreedVersion(3, state(3, "b")), None)
    assert of_two.given_up == {0: 0}


@pytest.mark.parametrize(
    ("alone", "given", "heard", "is_unshared"),
    [
        (6, -1, -1, True), (6, 2, 2, True), (6, 3, -1, False), (6, -1, 3, False), (0, -1, -1, False),
    ],
)  # fmt: skip
def test_what_was_made_alone_is_nobody_else_s_if_nobody_was_given_any(
    alone: int, given: int, heard: int, is_unshared: bool
) -> None:
    apart = one_that_made(alone, 2, {}, given=given, heard=heard)
    assert apart.is_unshared(0) == is_unshared
    assert apart.may_stay_unshared(0) == (is_unshared or not alone)


def test_of_more_rounds_than_are_remembered_nothing_goes_back() -> None:
    apart = one_that_made(PAST_KEPT + 4, 2, {}, given=-1)
    assert not apart.is_unshared(0)
    assert not apart.may_stay_unshared(0)


@pytest.mark.parametrize(
    ("others", "goes_to"),
    [
        ({"b": said(8, "b", FINISHES)}, (8, "b")),  # the larger digest, for want of more
        ({"b": said(8, "A", FINISHES)}, None),
        ({"b": said(7, "b", FINISHES), "c": said(9, "c", FINISHES)}, None),  # ours is what half have reached
        ({"b": said(7, "b", FINISHES), "c": said(7, "c", FINISHES)}, (7, "c")),
        (
            {
                "b": said(8, "z", FINISHES),
                "c": said(8, "z", FINISHES),
                "d": said(7, "a", FINISHES),
                "e": said(6, "a", FINISHES),
            },
            None,
        ),  # most are with us, or were where we came from: two liars move nobody
        ({"b": said(8, "b", FINISHES), "c": said(8, "b", FINISHES)}, None),  # a majority: not for us to say
        ({"b": said(8, "b", FINISHES), "c": said(7, "c", TRAINS)}, None),  # the next round heals it
        ({"b": said(7, "b", FINISHES), "c": said(7, "b", FINISHES), "d": said(9, "d", FINISHES)}, (7, "b")),
    ],
)
def test_where_all_finish_in_several_states_they_choose_one(
    others: dict[str, SimpleNamespace], goes_to: tuple[int, str] | None
) -> None:
    camp = one_that_made(6, 2, others, phase=FINISHES).camp(0)
    if goes_to is None:
        assert camp is None
    else:
        assert camp is not None
        assert (camp.version, camp.digest) == (goes_to[0], state(*goes_to))
        assert camp.wait_s == STRONGEST_AFTER_S


def test_who_loaded_a_last_round_that_its_makers_gave_up_goes_to_most_others_where_all_finish() -> None:
    """Of 32 that finished, eight had loaded what one made alone, and stayed there when it turned back."""
    others = {name: said(4, "a", FINISHES) for name in "bcd"} | {"e": said(5, "x", FINISHES)}
    apart = one_that_made(0, 3, others, phase=FINISHES)
    apart.moved(0, AgreedVersion(5, state(5, "x")), None)
    apart._node.agreed[0] = AgreedVersion(5, state(5, "x"))
    camp = apart.camp(0)
    assert camp is not None
    assert (camp.version, camp.digest, camp.holders) == (4, state(4, "a"), ("b", "c", "d"))
    assert camp.wait_s == STANDING_S  # long enough for them to have replayed it, if anybody gives it
    apart._node.membership.live[PeerId("b")] = said(4, "a")
    assert apart.camp(0) is None  # rounds go on
    apart._node.membership.live[PeerId("b")] = said(5, "x", FINISHES)
    assert apart.camp(0) is None  # they come to us
    replayed = one_that_made(1, 4, {name: said(4, "a", FINISHES) for name in "bcd"}, phase=FINISHES)
    replayed.moved(0, AgreedVersion(6, state(6, "a")), [ME, PeerId("other")])
    replayed._node.agreed[0] = AgreedVersion(6, state(6, "a"))
    assert replayed.camp(0) is None  # can give it


Words = dict[PeerId | int, Held | None]


def words_of(others: dict[str, SimpleNamespace]) -> Words:
    return {PeerId(name): (info.versions, info.digests) for name, info in others.items()}


def test_who_holds_what_others_left_with_does_not_go_back_to_those_who_lag() -> None:
    """A satellite had loaded the run's last state when the ten minutes of the others were over; with three
    that had an old one it went back to that, nine rounds (32 simulated peers, churn 6 an hour)."""
    loaded, old = AgreedVersion(8, state(8, "a")), {name: said(3, "b", FINISHES) for name in "bcd"}
    apart = one_that_made(0, 0, old, phase=FINISHES)
    apart.moved(0, loaded, None)
    apart._node.agreed[0] = loaded
    camp = apart.camp(0)
    assert camp is not None  # for all it knows its makers gave it up
    assert camp.version == 3
    words, here = apart._majority.last_words, words_of(old)
    words.note(here | words_of({"e": said(8, "a"), "f": said(8, "a")}), [9])
    assert apart.camp(0) is not None  # they are here, and may say something else next
    words.note(here, [9])
    assert apart.camp(0) is None
    words.note(here | words_of({name: said(3, "b") for name in "ghi"}), [9])
    words.note(here, [9])
    assert apart.camp(0) is not None  # more have left with that


@pytest.mark.parametrize(
    ("here", "left", "version", "turns_back"),
    [
        (12, 1, 8, True),  # or one that says so and leaves would keep us from all of them
        (3, 3, 8, False),
        (3, 4, 9, False),  # of the history that they left with this peer lacks one round
        (4, 2, 9, True),
        (3, 4, 7, True),
    ],
)
def test_who_is_here_counts_beside_who_has_gone(here: int, left: int, version: int, turns_back: bool) -> None:
    others = {f"here {number}": said(3, "b", FINISHES) for number in range(here)}
    apart = one_that_made(0, 0, others, phase=FINISHES)
    apart.moved(0, AgreedVersion(8, state(8, "a")), None)
    apart._node.agreed[0] = AgreedVersion(8, state(8, "a"))
    words = apart._majority.last_words
    gone = {f"gone {number}": said(version, "a") for number in range(left)}
    words.note(words_of(others | gone), [12])
    words.note(words_of(others), [12])
    assert (apart.camp(0) is not None) == turns_back
    alone = {PeerId("liar"): said(99, "liar", FINISHES)}
    apart._node.membership.live |= alone  # nobody goes by the word of one
    apart._node.membership.revision += 1
    words.note(words_of(others | {"liar": alone[PeerId("liar")]}), [12])
    assert turns_back or apart.camp(0) is None


@pytest.mark.parametrize("rests", [False, True])
def test_of_two_camps_from_which_as_many_have_left_one_goes_to_the_other(rests: bool) -> None:
    """Also where somebody who rests, and tells where it was left, is heard."""
    camps = ("a", "b")
    turned = []
    for mine, other in (camps, camps[::-1]):
        others = {"other": said(8, other, FINISHES)} | ({"r": said(2, "r", RESTS)} if rests else {})
        apart = one_that_made(0, 0, others, phase=FINISHES)
        apart._node.agreed[0] = AgreedVersion(8, state(8, mine))
        gone = {camp: said(8, camp) for camp in camps}
        words = apart._majority.last_words
        words.note(words_of(others | gone), [9])
        words.note(words_of(others), [9])
        turned.append(apart.camp(0) is not None)
    assert turned == [True, False]


def test_nobody_goes_anywhere_by_the_word_of_who_has_gone() -> None:
    """Two that lied and left would have sent all others after what nobody has."""
    others = {"b": said(8, "a", FINISHES)} | {name: said(3, "b", FINISHES) for name in "cd"}
    majority = one_that_made(0, 3, others, phase=FINISHES)._majority
    words = majority.last_words
    words.note(words_of(others | {name: said(8, "a") for name in "ef"}), [9])
    words.note(words_of(others), [9])
    assert words.gone_with(0).total() == 2
    assert majority.is_one_word(0, 8)
    assert majority.is_too_far(0, 8)
    assert majority.swarm_version(0) == 3
    assert words.newest(0) == 8  # what it lacks it can say


def test_who_says_that_it_holds_another_state_of_a_version_is_not_asked_for_it() -> None:
    """Three that told no lie were taken for liars, and asked for nothing in two minutes."""
    others = {"b": said(3, "b"), "c": said(3, "c"), "d": said(4, "d"), "e": said(2, "b")}
    majority = one_that_made(2, 1, others)._majority
    assert set(majority.donors(0, 3, state(3, "b"))) == {"b", "d"}
    assert set(majority.donors(0, 3)) == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("others", "is_contradicted"),
    [
        ({"b": said(3, "b"), "c": said(3, "c")}, False),  # ours and theirs and a third
        ({"b": said(2, "b"), "c": said(3, "c")}, False),  # who gave it had not yet said that it has it
        ({"b": said(3, "b"), "c": said(3, "a")}, True),
        ({"b": said(3, "b"), "c": said(3, "c"), "d": said(3, "c")}, False),
        ({"b": said(3, "b"), "c": said(3, "c"), "d": said(3, "c"), "e": said(3, "c")}, True),
    ],
)
def test_a_state_is_not_refused_on_one_word_against_another(
    others: dict[str, SimpleNamespace], is_contradicted: bool
) -> None:
    majority = one_that_made(2, 1, others)._majority
    assert majority.is_contradicted(0, 3, state(3, "b"), [PeerId("b")]) == is_contradicted


def test_who_goes_over_gives_nobody_what_it_made_alone() -> None:
    """Its lonely rounds and states have the numbers of those that the others will make."""
    catchup = CatchUp(make_identity(0), RUN, Shape((8, 8), (64, 64)))
    for fragment in (0, 1):
        catchup.remember(fragment, 3, Decision(), bytes(8))
        data = bytes(64)
        catchup.exported(fragment, 3, data, state(3, "a"), [chunk_digest(data)], 1.0)
    assert catchup.given(0) == -1
    asked = Fetch(request=1, what=ROUND, fragment=0, version=3, want_chunk=True)
    catchup.donor.receive(asked, PeerId("b"), 1.0)
    assert [catchup.given(fragment) for fragment in (0, 1)] == [3, -1]
    catchup.turned_back(0)
    assert catchup.given(0) == -1
    history = catchup.donor.history
    assert [history.find(fragment, 3) is None for fragment in (0, 1)] == [True, False]
    assert (history.held_bytes, catchup.donor.exported_bytes()) == (8, 64)


# ---- whole swarms


@pytest.mark.parametrize("they_come", [False, True])
async def test_what_was_loaded_to_go_back_is_not_taken_once_the_others_have_come(they_come: bool) -> None:
    """A state takes minutes over a slow line; meanwhile they may have fetched what we made alone."""
    others = {PeerId(name): said(9, "a") if they_come else said(3, "b") for name in "bc"}
    apart, adopted = one_that_made(6, 3, {}), list[AgreedVersion]()

    async def adopt(fragment: int, data: bytes, agreed: AgreedVersion, *, goes_back: bool) -> None:
        assert goes_back
        adopted.append(agreed)

    node: Any = apart._node
    node.membership.live = others
    node.catchup = SimpleNamespace(ask_swarm=lambda vouch: None)
    node.deciding = SimpleNamespace(adopt=adopt, settle_offer=lambda fragment: None)
    node.report = lambda kind, **fields: None
    catching = Catching(node)
    catching.apart = apart
    catching._back.add(0)
    catching._targets[0] = (3, state(3, "b"), tuple(others))
    goal = Goal(STATE, 0, 3, tuple(others), state(3, "b"))
    await catching._take_state(Fetched(goal, 3, b"", Decision(), state(3, "b"), tuple(others), 1.0, 0))
    assert adopted == ([] if they_come else [AgreedVersion(3, state(3, "b"))])
    assert not catching._back


@dataclass(frozen=True)
class Asleep:
    """All but the first sleep from ``at`` to ``until``; or (``is_net``) no two hear each other."""

    at: float
    calm_at: float
    is_net: bool = False

    def plan(self, swarm: Swarm) -> None:
        if self.is_net:
            sides = {peer: index for index, peer in enumerate(swarm.peer_ids())}
            swarm.world.call_at(self.at, swarm.split, sides)
            swarm.world.call_at(self.calm_at, swarm.heal)
            return
        for index in range(1, len(swarm.volunteers)):
            swarm.world.call_at(self.at, swarm.stall, index, self.calm_at)


@pytest.mark.parametrize(
    ("peers", "fault", "text"),
    [
        (3, Asleep(20.0, 45.0), "is kept for our next offer"),  # they wake before its end
        (4, Asleep(20.0, 60.0), "went without a word"),  # long after it
        (3, Asleep(20.0, 48.0, is_net=True), "going over to theirs"),
    ],
)
def test_one_that_trained_alone_and_those_who_wake_end_in_one_state(
    peers: int, fault: Asleep, text: str
) -> None:
    """Each ended with a state of its own, after waiting for the others as long as an end may take."""
    clock = ClockConfig(mode="time", round_s=4.0, rounds=12)
    run, told = RunConfig(name="sleepers", fragments=2, clock=clock), list[str]()
    alone, given_up = Counter[tuple[str, int]](), Counter[tuple[str, int]]()

    def hear(event: Event) -> None:
        if isinstance(event, Warned):
            told.append(event.text)
        elif isinstance(event, RoundCommitted) and event.group_size == 1:
            alone[event.peer, event.fragment] += 1
        elif isinstance(event, CaughtUp):
            given_up[event.peer, event.fragment] += event.rounds_given_up

    log = EventLog(digests=False)
    log.readers.append(hear)
    faults = fault  # a plan like ``Churn`` and ``Storm``
    settings = Settings(run=run, peers=peers, seed=1, faults=faults, profile="fibre")  # type: ignore[arg-type]
    given_back = list[int]()

    class Watched(CountingLedger):
        def _adopt(self, fragment: int, *arguments: Any) -> AgreedVersion:
            before = sum(self.fragments[fragment].counted)
            try:
                return super()._adopt(fragment, *arguments)
            finally:
                given_back.append(before - sum(self.fragments[fragment].counted))

    swarm = Swarm(settings, log, make_ledger=Watched)
    result = swarm.run()
    assert result.violations == []
    lost = swarm.books.written_off["counted in a history that was given up"]
    assert max(given_back) > 0
    assert fault.is_net or sum(filter(lambda units: units > 0, given_back)) == lost
    assert len(result.digests) == peers
    assert len(set(result.digests.values())) == 1
    assert any(text in words for words in told)
    assert given_up.total() > 0
    assert given_up <= alone


@pytest.mark.parametrize(
    ("at", "rounds", "seed"), [(20.0, 12, 1), (20.0, 12, 3), (25.0, 24, 15), (25.0, 24, 19), (25.0, 24, 35)]
)
def test_four_that_were_cut_off_from_one_another_are_soon_in_one_state(
    at: float, rounds: int, seed: int
) -> None:
    """Each was in a state of its own for a minute, or one to the end, when it had taken the others for
    liars."""
    clock = ClockConfig(mode="time", round_s=4.0, rounds=rounds)
    run, fault = RunConfig(name="sleepers", fragments=2, clock=clock), Asleep(at, at + 12.0, is_net=True)
    settings = Settings(run=run, peers=4, seed=seed, faults=fault, profile="fibre")  # type: ignore[arg-type]
    result = Swarm(settings, EventLog(digests=False)).run()
    assert result.violations == []
    assert result.forks > 0
    assert result.longest_fork_s < 12.0 + HEAL_ROUNDS * clock.round_s
    assert len(set(result.digests.values())) == 1
