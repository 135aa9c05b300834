"""The board for who cannot see it, has no mouse, or wants to see a chart otherwise: axe's rules on every
page, and what the keyboard and the charts' own tools do."""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from monitoring.glossary import GLOSSARY
from p2p_co2.wire.limits import MAX_FRAGMENTS
from tests.browser import board, browser, errors, missing, text_of, wait_for
from tests.made_swarm import peer_id

T = TypeVar("T")
pytestmark = [pytest.mark.swarm, pytest.mark.skipif(bool(missing()), reason=missing())]
PAGES = {
    "": "tokens", "run": "settings", "staleness": "staleness-mean", "bandwidth": "sent",
    "peers": "peers-count", "events": "events", f"peer/{peer_id(0)}": "peer-facts",
}  # fmt: skip
ROUND = {"own": "round/1/20", "stages": f"round/{2 * MAX_FRAGMENTS + 1}/20"}
MODES: dict[str, dict[str, bool]] = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}
CHARTS = """
const charts = [...document.querySelectorAll('.b-chart')];
return charts.map(chart => [chart.getAttribute('role'), chart.getAttribute('aria-label')]);
"""
LOSS = "getElement(parseInt(document.querySelector('[data-testid=chart-loss]').id.slice(1))).chart"
SPAN = f"return {LOSS}.getModel().getComponent('xAxis').axis.scale.getExtent()"
PAINTED = "return performance.getEntriesByType('paint').length > 0"
ZOOM = f"{LOSS}.dispatchAction({{type: 'dataZoom', dataZoomIndex: 0, startValue: START, endValue: END}})"


def axe() -> str:
    folder = importlib.resources.files("axe_selenium_python")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def violations(driver: WebDriver) -> list[str]:
    """What axe finds on the page, a line each."""
    driver.execute_script(axe())
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


def is_shown(driver: WebDriver, selector: str) -> bool:
    """Asked of the element, since one that is hidden has its text, too."""
    return in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, selector).is_displayed())


@pytest.mark.parametrize(("kind", "mode"), [*(("own", mode) for mode in MODES), ("stages", "light")])
def test_axe_finds_nothing_on_any_page(kind: str, mode: str) -> None:
    with board(["-m", "tests.board_server", kind]) as address, browser(**MODES[mode]) as driver:
        for page, ready in {**PAGES, ROUND[kind]: "round-outcome"}.items():
            driver.get(address + page)
            wait_for(driver, ready)
            time.sleep(1.0)  # charts and tables come a moment later
            assert violations(driver) == [], page
            charts = driver.execute_script(CHARTS)
            assert all(role == "img" and len(label) > 20 for role, label in charts), page
            assert errors(driver) == [], page
            assert len(driver.find_elements(By.TAG_NAME, "h1")) == 1
            assert driver.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en-US"


@pytest.mark.parametrize("kind", ["connecting", "empty", "gone", "lost"])
def test_axe_finds_nothing_where_there_is_nothing_to_show(kind: str) -> None:
    with board(["-m", "tests.board_server", kind]) as address, browser() as driver:
        driver.get(address)
        wait_for(driver, "banner" if kind == "lost" else f"nothing-{'lost' if kind == 'gone' else kind}")
        assert violations(driver) == []


def test_words_are_explained_and_rows_opened_by_keyboard() -> None:
    with board(["-m", "tests.board_server", "own"]) as address, browser() as driver:
        driver.get(f"{address}peers")
        wait_for(driver, "peers-table")
        until(lambda: driver.execute_script(PAINTED))  # before, a browser drops what is typed
        heading = "//th[contains(., 'Staleness')]"
        title = in_one_go(lambda: driver.find_element(By.XPATH, heading).get_attribute("title"))
        assert GLOSSARY["staleness"] in str(title)
        ask, words = "[data-testid=ask]", "[data-testid=words]"
        own = "[data-testid=peers-table] tr.b-mine a"
        assert not is_shown(driver, words)
        in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, ask).send_keys(Keys.ENTER))
        until(lambda: is_shown(driver, words))
        assert all(means in text_of(driver, "words") for means in GLOSSARY.values())
        assert violations(driver) == []
        in_one_go(lambda: driver.switch_to.active_element.send_keys(Keys.ESCAPE))
        until(lambda: not is_shown(driver, words))  # while they are, nothing else takes a key
        assert in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, own).text) == "peer-2"  # its own page
        in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, own).send_keys(Keys.ENTER))
        assert wait_for(driver, "peer-title") == "peer-2"


def option(driver: WebDriver) -> dict[str, Any]:
    """What the chart of the loss is drawn from now."""
    found: dict[str, Any] = json.loads(driver.execute_script(f"return JSON.stringify({LOSS}.getOption())"))
    return found


def press(driver: WebDriver, name: str) -> None:
    in_one_go(lambda: driver.find_element(By.XPATH, f"//button[normalize-space(.)='{name}']").click())


def test_charts_keep_their_zoom_and_are_smoothed_and_logarithmic_when_asked() -> None:
    with board(["-m", "tests.board_server", "own"]) as address, browser() as driver:
        driver.get(address)
        wait_for(driver, "tokens")
        until(lambda: "at the end" in driver.execute_script(CHARTS)[0][1])
        tools = option(driver)["toolbox"][0]["feature"]
        assert {"dataZoom", "restore", "saveAsImage"} <= tools.keys()
        start, end = driver.execute_script(SPAN)
        zoomed = [start + (end - start) // 4, start + (end - start) // 2]
        driver.execute_script(ZOOM.replace("START", str(zoomed[0])).replace("END", str(zoomed[1])))
        before = len(option(driver)["series"][1]["data"])
        until(lambda: len(option(driver)["series"][1]["data"]) > before + 1)  # it was drawn again, twice
        assert driver.execute_script(SPAN) == zoomed
        press(driver, "log")
        until(lambda: option(driver)["yAxis"][0]["type"] == "log")
        press(driver, "smooth")
        until(lambda: any("as measured" in str(one.get("name")) for one in option(driver)["series"]))
        assert any(one["markLine"]["data"] for one in option(driver)["series"] if one.get("markLine"))
        assert errors(driver) == []


def test_the_page_of_the_run_invites() -> None:
    with board(["-m", "tests.board_server", "own"]) as address, browser() as driver:
        driver.get(f"{address}run")
        until(lambda: text_of(driver, "invitation").startswith("p2p-co2 join p2pco2-"))
        in_one_go(lambda: driver.find_element(By.CSS_SELECTOR, "[data-testid=copy]").click())
        until(lambda: text_of(driver, "copied") in {"Copied.", "Selected: copy it with Ctrl-C."})
        until(lambda: "no" in text_of(driver, "seeds").split())  # nobody listens there
        assert "peer peer-2" in text_of(driver, "seeds")
        assert "clock.round_s" in text_of(driver, "settings")
        assert errors(driver) == []


def test_the_page_of_the_run_invites_where_nobody_trains() -> None:
    with board(["-m", "tests.board_server", "empty"]) as address, browser() as driver:
        driver.get(f"{address}run")
        until(lambda: text_of(driver, "invitation").startswith("p2p-co2 join p2pco2-"))
        assert text_of(driver, "run-state") == "Not known yet"
        assert violations(driver) == []
        assert errors(driver) == []


def test_the_reader_without_a_peer_is_shown_no_peer_of_its_own() -> None:
    with board(["-m", "tests.board_server", "6"]) as address, browser() as driver:
        driver.get(address)
        assert wait_for(driver, "run-state") in {"Healthy", "Degraded"}
        assert "left." in text_of(driver, "run-progress")
        assert not text_of(driver, "you")
        assert not text_of(driver, "machine")


def test_the_reader_with_a_peer_sees_it_first_with_its_machine() -> None:
    with board(["-m", "tests.board_server", "own"]) as address, browser() as driver:
        driver.get(address)
        assert "You: peer-2" in wait_for(driver, "you")
        assert text_of(driver, "you-state") == "Training"
        until(lambda: "in use" in text_of(driver, "machine-ram-sub"))
        first = driver.execute_script("return document.querySelector('.b-card').innerText")
        assert first.startswith("You: peer-2")
