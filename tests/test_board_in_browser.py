"""The board in a real browser: against a real swarm in which a peer is killed and one comes late, and against
states and texts that a swarm rarely has."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from monitoring.summary import RunFacts, summarise
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import Progress, RoundCommitted
from p2p_co2.wire.limits import MAX_FRAGMENTS
from tests.browser import board, browser, errors, missing, text_of, wait_for
from tests.event_samples import fold
from tests.made_swarm import EVIL, peer_id
from tests.swarms import Swarm, swarm

pytestmark = [pytest.mark.swarm, pytest.mark.skipif(bool(missing()), reason=missing())]
RUN = RunConfig(
    name="looked-at",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=3,
    clock=ClockConfig(mode="time", round_s=1.0),  # it ends when the test has seen enough
)
BOUND_S = 120.0
"""On what takes a second or a few."""
READY = {
    "": "tokens", "run": "run-state", "staleness": "staleness-mean", "bandwidth": "sent",
    "peers": "peers-count", "events": "events",
}  # fmt: skip
"""By page, what has a text as soon as it is drawn."""


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def made_board(kind: str) -> AbstractContextManager[str]:
    """A board over a made-up swarm; its address."""
    return board(["-m", "tests.board_server", kind])


def board_of(running: Swarm) -> str:
    """Start ``p2p-co2 board TICKET`` beside a swarm; its address."""
    folder = str(running.folder / "board")
    command = [sys.executable, "-u", "-m", "p2p_co2.cli", "board", running.ticket, "--folder", folder]
    running.start("board", command)
    return address_in_log_of(running, "board")


def address_in_log_of(running: Swarm, name: str) -> str:
    """The address of a board that a process has printed."""
    eventually(lambda: "board: " in running.log(name) or running.processes[name].poll() is not None)
    found = re.search(r"board: (\S+)", running.log(name))
    assert found, running.log(name)
    return found[1]


def peer_rows(driver: WebDriver) -> dict[str, list[str]]:
    """Cells of the table of peers by the first one."""
    script = """
        const rows = document.querySelectorAll('[data-testid="peers-table"] tbody tr');
        return [...rows].map(row => [...row.querySelectorAll('td')].map(cell => cell.innerText));
    """
    cells = driver.execute_script(script)  # in one go: the table changes every second
    return {row[0]: row[1:] for row in cells if row}


def summary_of(running: Swarm, names: tuple[str, ...]) -> dict[str, Any]:
    """``summary.json`` of the swarm, as a demo writes it."""
    view = fold(itertools.chain(*(running.events(name) for name in names)))
    summary = summarise(view, RunFacts(config=running.run))
    (running.folder / "summary.json").write_text(json.dumps(summary))
    written: dict[str, Any] = json.loads((running.folder / "summary.json").read_text())
    return written


def test_the_page_says_what_the_swarm_did(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "late")
    with swarm(tmp_path, RUN) as running, browser() as driver:
        for place, name in enumerate(names[:4]):
            running.start_peer(name, "--min-peers", "4", "--seed", str(place))
        address = board_of(running)
        driver.get(address)
        running.wait_for("a", RoundCommitted, 12)
        wait_until(driver, "peers-online", "4")
        first = number(wait_for(driver, "tokens"))
        see_a_peers_own_page(driver, running)
        driver.get(address)
        killed, told = running.events("d")[0].peer, last_tokens(running, "d")
        wait_until_heard(address, killed, told)  # what it does from now on may be lost with it
        running.processes["d"].kill()
        running.start_peer("late", "--seed", "9", "--no-board")
        running.wait_for("late", Progress, 3)
        assert address_in_log_of(running, "late") == "none"
        eventually(lambda: number(text_of(driver, "tokens")) > first)
        wait_until(driver, "troubles", f"~{killed[-6:]}")
        wait_until(driver, "troubles", "is gone|aborted")  # at first it only falls behind
        wait_until_heard(address, running.events("late")[0].peer)
        for name in ("a", "b", "c", "late"):
            running.processes[name].send_signal(signal.SIGINT)
        running.wait("a", "b", "c", "late")
        summary = summary_of(running, names)
        wait_until(driver, "peers-online", "0")
        running.processes["seed"].kill()  # now nobody is left who could answer; what is known stays
        lost = lost_of(summary, killed, told)
        eventually(lambda: check_swarm_page(driver, summary, lost))  # it is brought up to date once a second
        driver.get(f"{address}peers")
        wait_for(driver, "peers-count")
        eventually(lambda: check_peers(peer_rows(driver), summary, killed, lost))
        driver.get(f"{address}staleness")
        wait_for(driver, "staleness-mean")
        mean = pytest.approx(summary["staleness"]["mean"], abs=0.03)
        eventually(lambda: number(text_of(driver, "staleness-mean")) == mean)
        driver.get(f"{address}events")
        assert "committed" in wait_for(driver, "events")
        assert errors(driver) == []
        wait_until(driver, "state", "out of reach")
        assert "no seed can be reached" in wait_for(driver, "banner")


def see_a_peers_own_page(driver: WebDriver, running: Swarm) -> None:
    """A peer in the user's own loop serves a page too, with what the others say."""
    driver.get(address_in_log_of(running, "a"))
    wait_until(driver, "peers-online", "4")
    wait_until(driver, "run", f"seen by peer ~{running.events('a')[0].peer[-6:]}")
    assert number(wait_for(driver, "tokens")) > 0
    assert f"You: ~{running.events('a')[0].peer[-6:]}" in wait_for(driver, "you")  # it has no name
    wait_until(driver, "you-share", r"\d")
    wait_until(driver, "you-round", r"\d")
    wait_until(driver, "machine-ram-sub", "this peer .* in use")
    wait_until(driver, "run-state", "Healthy")
    driver.get(f"{address_in_log_of(running, 'a')}run")
    ticket = (running.folder / "a" / "ticket").read_text().strip()
    wait_until(driver, "invitation", f"P2P_CO2_TICKET={ticket} python my_loop.py")
    wait_until(driver, "seeds", "yes")
    assert errors(driver) == []


def see(driver: WebDriver, address: str, ready: str) -> None:
    """Open a page, and let it draw what it has to."""
    driver.get(address)
    wait_for(driver, ready)
    time.sleep(0.7)


def wait_until(driver: WebDriver, test_id: str, pattern: str) -> None:
    eventually(lambda: check_text(driver, test_id, pattern))


def check_text(driver: WebDriver, test_id: str, pattern: str) -> None:
    assert re.search(pattern, text_of(driver, test_id))


def eventually(check: Callable[[], object]) -> None:
    """Until ``check`` asserts nothing any more, or says True: a page follows the swarm, some time later."""
    ends_at = time.monotonic() + BOUND_S
    while True:
        try:
            assert check() is not False
            return
        except AssertionError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.3)


def last_tokens(running: Swarm, name: str) -> int:
    """What a peer has told its own journal of its tokens."""
    return max(event.tokens for event in running.events(name) if isinstance(event, Progress))


def wait_until_heard(address: str, peer: str, tokens: int = 1) -> None:
    """Until the board has so many tokens of a peer from its own reports: the DHT is asked every few
    seconds."""

    def check() -> None:
        with urllib.request.urlopen(f"{address}api/swarm", timeout=BOUND_S) as answer:
            told = json.load(answer)
        heard = {known["peer"]: known["tokens"] for known in told["peers"]}
        assert heard.get(peer, -1) >= tokens, told["connection_words"]

    eventually(check)


def lost_of(summary: dict[str, Any], killed: str, told: int) -> int:
    """What the killed peer did after the board last heard of it, at most."""
    (peer,) = [peer for peer in summary["peer_table"].values() if peer["peer"] == killed]
    return int(peer["tokens"]) - told


def check_swarm_page(driver: WebDriver, summary: dict[str, Any], lost: int) -> None:
    tokens = number(text_of(driver, "tokens"))
    assert summary["tokens"] - lost <= tokens <= summary["tokens"]
    assert number(text_of(driver, "rounds")) == summary["rounds"]["committed"]
    assert "of 5 known" in text_of(driver, "peers-online-sub")
    assert text_of(driver, "peers-online") == "0"


def check_peers(rows: dict[str, list[str]], summary: dict[str, Any], killed: str, lost: int) -> None:
    table = summary["peer_table"]
    assert set(rows) == set(table)
    shares = 0.0
    for label, peer in table.items():
        state, _, tokens, share, *_ = rows[label]
        shares += number(share)
        if peer["peer"] == killed:
            assert state == "gone"
            assert peer["tokens"] - lost <= number(tokens) <= peer["tokens"]
            assert re.search("silent|unreachable|others say", rows[label][-1])
        else:
            assert state == "finished"
            assert number(tokens) == peer["tokens"]
    assert shares == pytest.approx(100.0, abs=0.1)


def test_a_hostile_peer_is_shown_as_text_and_breaks_no_page() -> None:
    with made_board("evil") as address, browser() as driver:
        others = {"round/3/12": "round-outcome", "peer/" + "x" * 60: "peer-title",
                  f"peer/{peer_id(0)}": "peer-facts", f"peer/{peer_id(99)}": "peer-facts",
                  "round/0/999999": "round-outcome"}  # fmt: skip
        for page, ready in (READY | others).items():
            see(driver, address + page, ready)
            assert driver.title.endswith("p2p-co2")
            assert not driver.find_elements(By.CSS_SELECTOR, "img[src='x']")
            assert errors(driver) == [], page
        driver.get(f"{address}peers")
        wait_for(driver, "peers-count")
        assert any(EVIL[:20] in label for label in peer_rows(driver))
        driver.get(address)
        wait_until(driver, "troubles", "publishes nonsense")


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("connecting", "connecting", "Looking for the swarm"),
        ("empty", "empty", "Nobody is training right now"),
        ("over", "over", "The run is over"),
        ("gone", "lost", "The swarm is out of reach"),
    ],
)
def test_having_nothing_to_show_is_designed(kind: str, state: str, words: str) -> None:
    with made_board(kind) as address, browser(phone=True) as driver:
        driver.get(address)
        assert words in wait_for(driver, f"nothing-{state}")
        assert errors(driver) == []


def test_a_lost_swarm_is_shown_as_it_was_with_its_age() -> None:
    with made_board("lost") as address, browser(dark=True) as driver:
        driver.get(address)
        assert "out of reach" in wait_for(driver, "banner")
        assert text_of(driver, "state") == "out of reach"
        assert number(wait_for(driver, "tokens")) > 0


def test_every_page_says_that_a_stage_has_no_replica() -> None:
    with made_board("stages") as address, browser() as driver:
        for page, ready in READY.items():
            see(driver, address + page, ready)
            wait_until(driver, "banner", "Stage 3 of 4 has no replica: training waits; join with --stage 3")
            assert errors(driver) == [], page
        driver.get(address)
        assert "without replica" in wait_for(driver, "stages")
        driver.get(f"{address}bandwidth")
        assert "stage 2 and 3" in wait_for(driver, "hops")
        driver.get(f"{address}round/{2 * MAX_FRAGMENTS + 1}/20")

        def has_its_stage() -> None:
            assert "stage 2" in driver.page_source

        eventually(has_its_stage)


@pytest.mark.parametrize("kind", ["6", "stages", "evil"])
def test_a_page_fits_a_phone(kind: str) -> None:
    with made_board(kind) as address, browser(phone=True) as driver:
        for page, ready in READY.items():
            see(driver, address + page, ready)
            wider = driver.execute_script("return document.documentElement.scrollWidth - screen.width")
            assert wider <= 0, page
            if page == "events":  # and what happened can be read without moving the table
                last = driver.execute_script("""
                    const cells = [...document.querySelectorAll('[data-testid=events] td')];
                    return Math.max(...cells.map(cell => cell.getBoundingClientRect().right));
                """)
                assert 0 < last <= driver.execute_script("return screen.width")
