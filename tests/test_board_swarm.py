"""The board of a real swarm in which a peer is killed and one comes late: what it tells is what they did."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitoring.summary import RunFacts, summarise
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import Paused, Progress, Resumed, RoundCommitted
from tests.event_samples import fold
from tests.swarms import Swarm, swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="looked-at", recipe="own-loop", recipe_digest=recipe_digest("own-loop", {}), fragments=3,
    clock=ClockConfig(mode="time", round_s=1.0),  # it ends when the test has seen enough
)  # fmt: skip
BOUND_S = 120.0
"""On what takes a second or a few."""


def eventually(check: Callable[[], object]) -> None:
    """Until ``check`` asserts nothing any more: a board follows the swarm, some time later."""
    ends_at = time.monotonic() + BOUND_S
    while True:
        try:
            check()
            return
        except AssertionError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.3)


def address_of(running: Swarm, name: str) -> str:
    """Of the board that a process has printed."""
    found: list[str] = []

    def printed() -> None:
        found[:] = re.findall(r"board: (\S+)", running.log(name))
        assert found, running.log(name)

    eventually(printed)
    return found[0]


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=BOUND_S) as answer:
        return str(answer.read().decode())


def facts_at(address: str) -> dict[str, Any]:
    """What a board tells, peers by their id."""
    told: dict[str, Any] = json.loads(page(f"{address}api/swarm"))
    return {**told, "peers": {peer["peer"]: peer for peer in told["peers"]}}


def wait_until_heard(address: str, peer: str, tokens: int = 1) -> None:
    """Until the board has so many tokens of a peer from its own reports."""

    def check() -> None:
        told = facts_at(address)
        assert told["peers"].get(peer, {"tokens": -1})["tokens"] >= tokens, told["connection_words"]

    eventually(check)


def test_a_board_tells_what_the_swarm_did(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "late")
    with swarm(tmp_path, RUN) as running:
        for place, name in enumerate(names[:4]):
            running.start_peer(name, "--min-peers", "4", "--seed", str(place))
        command = [sys.executable, "-u", "-m", "p2p_co2.cli", "board", running.ticket]
        running.start("board", [*command, "--folder", str(tmp_path / "board")])
        address = address_of(running, "board")
        running.wait_for("a", RoundCommitted, 12)
        peers = {name: running.events(name)[0].peer for name in names[:4]}
        for peer in peers.values():
            wait_until_heard(address, peer)
        see_a_peers_own_board(running, peers["a"])
        told = max(event.tokens for event in running.events("d") if isinstance(event, Progress))
        wait_until_heard(address, peers["d"], told)  # what it does from now on may be lost with it
        running.processes["d"].kill()
        running.start_peer("late", "--seed", "9", "--no-board")
        running.wait_for("late", Progress, 3)
        peers["late"] = running.events("late")[0].peer
        assert address_of(running, "late") == "none"
        eventually(lambda: is_told_of(address, peers["d"]))
        wait_until_heard(address, peers["late"])
        for name in ("a", "b", "c", "late"):
            running.processes[name].send_signal(signal.SIGINT)
        running.wait("a", "b", "c", "late")
        eventually(lambda: is_as_written(facts_at(address), running, peers, told))
        running.processes["seed"].kill()  # now nobody is left who could answer; what is known stays
        eventually(lambda: is_lost(address))
        is_as_written(facts_at(address), running, peers, told)


def see_a_peers_own_board(running: Swarm, peer: str) -> None:
    """A peer in the user's own loop serves a page too, with what the others say."""
    address = address_of(running, "a")

    def check() -> None:
        told = facts_at(address)
        assert (told["me"], told["peers_online"], told["state"]) == (peer, 4, "Healthy")
        assert told["place"] == "seen by the peer of this machine"
        assert told["peers"][peer]["share_counted"] > 0
        assert told["my_exchange"] is not None

    eventually(check)
    ticket = (running.folder / "a" / "ticket").read_text().strip()
    assert f"P2P_CO2_TICKET={ticket} python my_loop.py" in page(f"{address}run")
    pause_from_the_page(running, address)


def pause_from_the_page(running: Swarm, address: str) -> None:
    """What its button does; no other page can, nor one that is old."""
    found = re.search(r"""X-Token[\\"': ]+([\w-]+)""", page(address))
    assert found is not None
    token = found[1]

    def wish(wanted: str, **headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = urllib.request.Request(f"{address}wish?wish={wanted}", method="POST", headers=given)
        try:
            with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert wish("pause") == wish("pause", X_Token=token[::-1]) == 403
    assert wish("pause", X_Token=token, Origin="http://evil.example") == 403
    assert wish("pause", X_Token=token, Host="evil.example") == 403
    assert wish("sleep", X_Token=token) == 422
    assert not any(isinstance(event, Paused) for event in running.events("a"))
    assert wish("pause", X_Token=token) == 204
    running.wait_for("a", Paused, 1)
    me = facts_at(address)["me"]
    eventually(lambda: is_resting(facts_at(address)["peers"][me]))
    assert wish("go%20on", X_Token=token) == 204
    running.wait_for("a", Resumed, 1)


def is_resting(peer: dict[str, Any]) -> None:
    assert (peer["state"], peer["reason"]) == ("paused", "paused by hand")


def is_told_of(address: str, killed: str) -> None:
    words = " ".join(one["words"] for one in facts_at(address)["troubles"] if one["peer"] == killed)
    assert "is gone" in words  # at first it only falls behind


def is_lost(address: str) -> None:
    facts = facts_at(address)
    assert facts["connection"] == "lost"
    assert "no seed can be reached" in facts["connection_words"]


def is_as_written(facts: dict[str, Any], running: Swarm, peers: dict[str, str], told: int) -> None:
    """What the board says is what the peers' journals say; of d, what it had told when it was killed."""
    view = fold(itertools.chain(*(running.events(name) for name in peers)))
    summary = summarise(view, RunFacts(config=running.run))
    written = {peer["peer"]: peer for peer in summary["peer_table"].values()}
    lost = written[peers["d"]]["tokens"] - told
    assert facts["peers"].keys() == written.keys() == set(peers.values())
    assert facts["peers_online"] == 0
    assert summary["tokens"] - lost <= facts["tokens"] <= summary["tokens"]
    assert facts["rounds_committed"] == summary["rounds"]["committed"]
    assert facts["staleness_mean"] == pytest.approx(summary["staleness"]["mean"], abs=0.03)
    assert sum(peer["share_counted"] for peer in facts["peers"].values()) == pytest.approx(1.0, abs=0.001)
    for name, peer in peers.items():
        shown = facts["peers"][peer]
        if name == "d":
            assert shown["state"] == "gone"
            assert re.search("silent|unreachable|others say", shown["reason"])
        else:
            assert (shown["state"], shown["tokens"]) == ("finished", written[peer]["tokens"])
