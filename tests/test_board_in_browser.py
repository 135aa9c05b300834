"""What only a browser can see of the board: every page of made-up swarms by axe's rules, what a hostile
peer's text does, a phone's width, the keyboard, and the charts' own tools."""

from __future__ import annotations

import importlib.resources
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

import pytest
from selenium.common.exceptions import (
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from monitoring.glossary import GLOSSARY
from p2p_co2.wire.limits import MAX_FRAGMENTS
from tests.browser import board, browser, errors, missing, text_of, wait_for
from tests.made_swarm import EVIL, peer_id

T = TypeVar("T")
pytestmark = [pytest.mark.swarm, pytest.mark.skipif(bool(missing()), reason=missing())]
READY = {
    "": "tokens", "run": "settings", "staleness": "staleness-mean", "bandwidth": "sent",
    "peers": "peers-count", "events": "events", f"peer/{peer_id(0)}": "peer-facts",
}  # fmt: skip
"""By page, what has a text as soon as it is drawn."""
MORE = {
    "own": {"round/1/20": "round-outcome"},
    "stages": {f"round/{2 * MAX_FRAGMENTS + 1}/20": "round-outcome"},
    "evil": {"round/3/12": "round-outcome", "peer/" + "x" * 60: "peer-title",
             f"peer/{peer_id(99)}": "peer-facts", "round/0/999999": "round-outcome"},
}  # fmt: skip
EVENTS_END = """
const cells = [...document.querySelectorAll('[data-testid=events] td')];
return Math.max(...cells.map(cell => cell.getBoundingClientRect().right));
"""
LOSS = "getElement(parseInt(document.querySelector('[data-testid=chart-loss]').id.slice(1))).chart"
TOLD = "return document.querySelector('[data-testid=chart-loss][role=img]').getAttribute('aria-label')"
"""Of the chart of the loss."""
SPAN = f"return {LOSS}.getModel().getComponent('xAxis').axis.scale.getExtent()"
WISHES = """return performance.getEntriesByType('resource')
.filter(one => one.name.endsWith('/wish?wish=pause')).map(one => one.responseStatus)"""
PAINTED = "return performance.getEntriesByType('paint').length > 0"
ZOOM = f"{LOSS}.dispatchAction({{type: 'dataZoom', dataZoomIndex: 0, startValue: START, endValue: END}})"
EMPTY_STAGE = "Stage 3 of 4 has no replica: training waits; join with --stage 3"


DRAWN = """
const charts = [...document.querySelectorAll('.b-chart')].filter(chart => chart.offsetParent);
return charts.every(chart => chart.querySelector('canvas') && chart.getAttribute('aria-label').length > 20);
"""
"""Every chart has said in a sentence what it shows."""
BARS = """
const rows = [...document.querySelectorAll('[data-testid=peers-table] tbody tr')];
return rows.filter(row => row.innerText).map(row => [row.querySelector('a').innerText,
                        parseInt(row.querySelector('.b-bar-done').style.width)]);
"""
"""Of the table of peers: names, and how long their bars are (%)."""
BOARDS = ExitStack()
BROWSERS = ExitStack()
"""That tests share; browsers end first, since a board waits for its pages."""


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    with BOARDS, BROWSERS:
        yield
    board_of.cache_clear()
    browser_in.cache_clear()


@cache
def board_of(kind: str) -> str:
    return BOARDS.enter_context(board(["-m", "tests.board_server", kind]))


@cache
def browser_in(mode: str) -> WebDriver:
    return BROWSERS.enter_context(browser(phone=mode == "phone", dark=mode == "dark"))


@contextmanager
def looking(kind: str, page: str = "", mode: str = "") -> Iterator[tuple[WebDriver, str]]:
    """A browser at a page of a made-up board, and its address; nothing may have gone wrong in the end.
    ``mode``: "dark", "phone" or ""."""
    address = board_of(kind)
    driver = browser_in(mode)
    driver.get(address + page)
    yield driver, address
    assert errors(driver) == []


def violations(driver: WebDriver) -> list[str]:
    """What axe finds on the page, a line each."""
    folder = importlib.resources.files("axe_selenium_python") / "node_modules" / "axe-core"
    driver.execute_script((folder / "axe.min.js").read_text(encoding="utf-8"))
    script = "axe.run().then(arguments[arguments.length - 1])"
    found: dict[str, Any] = driver.execute_async_script(script)
    assert len(found["passes"]) > 9  # it has looked
    return [f"{one['id']}: {one['nodes'][0]['html'][:300]}" for one in found["violations"]]


def until(check: Callable[[], object], bound_s: float = 60.0) -> None:
    """A page follows what is done to it, some time later."""
    ends_at = time.monotonic() + bound_s
    while not check():
        assert time.monotonic() < ends_at
        time.sleep(0.2)


def in_one_go(act: Callable[[], T], bound_s: float = 20.0) -> T:
    """A page may draw an element anew between it is found and used, or not have it ready yet: then it is
    found again, for so long."""
    ends_at = time.monotonic() + bound_s
    while True:
        try:
            return act()
        except (StaleElementReferenceException, ElementNotInteractableException):
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.05)


def press(driver: WebDriver, selector: str, key: str = "") -> None:
    """Click an element, or send it a key."""

    def act() -> None:
        found = driver.find_element(By.XPATH if selector.startswith("//") else By.CSS_SELECTOR, selector)
        if key:
            found.send_keys(key)
        else:
            found.click()

    in_one_go(act)


def says(driver: WebDriver, test_id: str, pattern: str) -> None:
    until(lambda: re.search(pattern, text_of(driver, test_id)))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("own", ""), ("own", "dark"), ("own", "phone"), ("stages", ""), ("stages", "phone"), ("evil", ""),
     ("evil", "phone")],
)  # fmt: skip
def test_every_page_can_be_read_by_everybody(kind: str, mode: str) -> None:
    with looking(kind, "", mode) as (driver, address):
        for page, ready in (READY | MORE[kind]).items():
            driver.get(address + page)
            wait_for(driver, ready)
            until(lambda: driver.execute_script(DRAWN))
            assert errors(driver) == [], page
            if kind == "own" or (kind, mode) == ("stages", ""):
                assert violations(driver) == [], page
            assert len(driver.find_elements(By.TAG_NAME, "h1")) == 1
            assert driver.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en-US"
            assert driver.title.endswith("p2p-co2")  # a hostile name is no program
            assert not driver.find_elements(By.CSS_SELECTOR, "img[src='x']")
            if kind == "stages":
                says(driver, "banner", EMPTY_STAGE)
            if mode == "phone":
                wider = driver.execute_script("return document.documentElement.scrollWidth - screen.width")
                assert wider <= 0, page
            if mode == "phone" and page == "events":  # what happened can be read without moving the table
                last = driver.execute_script(EVENTS_END)
                assert 0 < last <= driver.execute_script("return screen.width")


def test_pages_tell_what_they_are_for_and_of_a_hostile_peer() -> None:
    with looking("stages") as (driver, address):
        says(driver, "stages", "without replica")
        driver.get(f"{address}bandwidth")
        says(driver, "hops", "stage 2 and 3")
    with looking("evil") as (driver, address):
        says(driver, "troubles", "publishes nonsense")
        driver.get(f"{address}peers")
        says(driver, "peers-table", re.escape(EVIL[:20]))
    with looking("own", "events") as (driver, address):  # each begins with what a reader looks for
        says(driver, "events", "peer started")
        assert "exchange committed" not in text_of(driver, "events")
        press(driver, "//button[normalize-space(.)='exchanges']")
        says(driver, "events", "exchange committed")
        driver.get(f"{address}peers")
        says(driver, "peers-table", "2,400")
        rows = driver.execute_script(BARS)
        assert rows == sorted(rows, key=lambda row: -row[1])
        assert (rows[0], rows[-1][1]) == (["peer-5", 100], 0)
        driver.get(f"{address}staleness")
        says(driver, "verdict", "% fresh, .* one step late: as it should be")
        driver.get(f"{address}bandwidth")
        says(driver, "month", r"at this rate \d.* a month")
    with looking("own", "run", "phone") as (driver, _):  # where a tap explains
        says(driver, "settings", "outer.gap_penalty")
        assert text_of(driver, "told") == ""
        press(driver, "//span[normalize-space(.)='outer.gap_penalty']")
        says(driver, "told", "CO2's staleness gap penalty")
        press(driver, "[data-testid=told]")
        until(lambda: text_of(driver, "told") == "")


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("connecting", "nothing-connecting", "Looking for the swarm"),
        ("empty", "nothing-empty", "Nobody is training right now"),
        ("over", "nothing-over", "The run is over"),
        ("gone", "nothing-lost", "The swarm is out of reach"),
        ("lost", "banner", "out of reach"),
        ("own no/such", "nothing-wrong", "No such page"),
        ("own round/first/1", "nothing-wrong", "No such page"),
    ],
)
def test_having_nothing_new_to_show_is_designed(kind: str, state: str, words: str) -> None:
    kind, _, page = kind.partition(" ")
    with looking(kind, page) as (driver, _):
        assert words in wait_for(driver, state)
        assert violations(driver) == []
        if page:
            assert ["404" in told for told in errors(driver)] == [True]  # the browser says so
        if kind == "lost":  # it is shown as it was
            assert text_of(driver, "state") == "out of reach"
            says(driver, "tokens", r"\d")


def test_words_are_explained_and_rows_opened_by_keyboard() -> None:
    with looking("own", "peers") as (driver, _):
        wait_for(driver, "peers-table")
        until(lambda: driver.execute_script(PAINTED))  # before, a browser drops what is typed
        heading = "//th[contains(., 'Staleness')]"
        title = in_one_go(lambda: driver.find_element(By.XPATH, heading).get_attribute("title"))
        assert GLOSSARY["staleness"] in str(title)
        words = "[data-testid=words]"

        def is_shown() -> bool:
            """Asked of the element, since one that is hidden has its text, too."""
            return in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, words).is_displayed())

        assert not is_shown()
        press(driver, "[data-testid=ask]", Keys.ENTER)
        until(is_shown)
        assert all(means in text_of(driver, "words") for means in GLOSSARY.values())
        assert violations(driver) == []
        in_one_go(lambda: driver.switch_to.active_element.send_keys(Keys.ESCAPE))
        until(lambda: not is_shown())  # while they are, nothing else takes a key
        own = "[data-testid=peers-table] tr.b-mine a"
        assert in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, own).text) == "peer-2"  # its own page
        press(driver, own, Keys.ENTER)
        assert wait_for(driver, "peer-title") == "peer-2"


def option(driver: WebDriver) -> dict[str, Any]:
    """What the chart of the loss is drawn from now."""
    found: dict[str, Any] = json.loads(driver.execute_script(f"return JSON.stringify({LOSS}.getOption())"))
    return found


def test_charts_keep_their_zoom_and_are_smoothed_and_logarithmic_when_asked() -> None:
    with looking("own") as (driver, _):
        wait_for(driver, "tokens")
        until(lambda: "at the end" in driver.execute_script(TOLD))
        tools = option(driver)["toolbox"][0]["feature"]
        assert {"dataZoom", "restore", "saveAsImage"} <= tools.keys()
        start, end = driver.execute_script(SPAN)
        zoomed = [start + (end - start) // 4, start + (end - start) // 2]
        driver.execute_script(ZOOM.replace("START", str(zoomed[0])).replace("END", str(zoomed[1])))
        before = len(option(driver)["series"][1]["data"])
        until(lambda: len(option(driver)["series"][1]["data"]) > before + 1)  # it was drawn again, twice
        assert driver.execute_script(SPAN) == zoomed
        press(driver, "//button[normalize-space(.)='log']")
        until(lambda: option(driver)["yAxis"][0]["type"] == "log")
        press(driver, "//button[normalize-space(.)='smooth']")
        until(lambda: any("as measured" in str(one.get("name")) for one in option(driver)["series"]))
        assert any(one["markLine"]["data"] for one in option(driver)["series"] if one.get("markLine"))


@pytest.mark.parametrize("kind", ["own", "empty"])
def test_the_page_of_the_run_invites(kind: str) -> None:
    with looking(kind, "run") as (driver, _):
        says(driver, "invitation", "^p2p-co2 join p2pco2-")
        says(driver, "settings", "clock.round_s")
        press(driver, "[data-testid=copy]")
        says(driver, "copied", r"^(Copied\.|Selected: copy it with Ctrl-C\.)$")
        says(driver, "seeds", r"\bno\b")  # nobody listens there
        if kind == "own":
            says(driver, "seeds", "peer peer-2")
        else:
            assert text_of(driver, "run-state") == "Not known yet"


@pytest.mark.parametrize("kind", ["own", "evil"])
def test_the_reader_with_a_peer_sees_it_first_with_its_machine_and_another_sees_none(kind: str) -> None:
    with looking(kind) as (driver, _):
        says(driver, "run-state", "Healthy|Degraded")
        assert "left." in text_of(driver, "run-progress")
        if kind == "evil":
            assert (text_of(driver, "you"), text_of(driver, "machine")) == ("", "")
            return
        assert text_of(driver, "you-state") == "Training"
        assert text_of(driver, "wish") == "Pause"
        press(driver, "[data-testid=wish]")
        until(lambda: driver.execute_script(WISHES) == [204])
        says(driver, "machine-ram-sub", "in use")
        first = driver.execute_script("return document.querySelector('.b-card').innerText")
        assert first.startswith("You: peer-2")
