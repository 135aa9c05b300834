"""Every page of the board as pictures: ``make screenshots`` (or ``python -m tools.screenshots [FOLDER]``).

A real demo runs (five peers, one killed, one late) while a browser looks at its board; dark and phone width
are taken of the same run from its journals; the states of having nothing to show come from made-up feeds.
Two of the pictures go into ``docs/`` with ``--docs``.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from tests.browser import board, browser, missing, wait_for, whole_page
from tests.swarms import ENVIRONMENT, ROOT

SECONDS = 300
PAGES = {
    "swarm": "",
    "run": "run",
    "staleness": "staleness",
    "bandwidth": "bandwidth",
    "peers": "peers",
    "events": "events",
}
MODES: dict[str, dict[str, bool]] = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}
READY = {
    "swarm": "tokens",
    "run": "settings",
    "staleness": "staleness-mean",
    "bandwidth": "sent",
    "peers": "peers-count",
    "events": "events",
}
MOST_BYTES = 150_000
DOCS = {"swarm-light": "board.png", "staleness-light": "board-staleness.png"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/screenshots"))
    parser.add_argument("--docs", action="store_true", help="replace the pictures that the README shows")
    options = parser.parse_args()
    if missing():
        print(f"error: {missing()}", file=sys.stderr)
        return 2
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / time.strftime("run-%H%M%S")
    log = (folder / "demo.log").open("w+b")
    command = [sys.executable, "-u", "-m", "p2p_co2.cli", "demo", "--kill-one", "--seconds", str(SECONDS)]
    demo = subprocess.Popen(
        [*command, "--folder", str(run)], stdout=log, stderr=log, env=ENVIRONMENT, cwd=ROOT
    )
    try:
        address = _address(folder / "demo.log", demo)
        print(f"looking at {address}", flush=True)
        with browser() as driver:
            _wait_for_the_late_one(driver, address)
        _all_pages(folder, address, "light")  # live, while the swarm runs
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(60)
        log.close()
    with board(["-m", "p2p_co2.cli", "board", str(run)]) as address:
        for mode in ("dark", "phone"):
            _all_pages(folder, address, mode)  # the same run from its journals, as long as it takes
    _states(folder)
    _own(folder)
    if options.docs:
        for source, target in DOCS.items():
            _publish(folder / f"{source}.png", ROOT / "docs" / target)
    print(f"written to {folder}")
    return 0


def _publish(picture: Path, target: Path) -> None:
    """In few colours where it would be too large for a page that many load."""
    target.write_bytes(picture.read_bytes())
    if target.stat().st_size > MOST_BYTES:
        with Image.open(picture) as opened:
            opened.convert("RGB").quantize(256).save(target, optimize=True)


def _all_pages(folder: Path, address: str, mode: str) -> None:
    with browser(**MODES[mode]) as driver:
        for name, path in PAGES.items():
            _picture(driver, address + path, READY[name], folder / f"{name}-{mode}.png", mode == "phone")
        _deeper(driver, address, folder, mode)


def _address(log: Path, demo: subprocess.Popen[bytes]) -> str:
    ends_at = time.monotonic() + 120
    while time.monotonic() < ends_at and demo.poll() is None:
        found = re.search(r"board: (\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the demo printed no address: {log.read_text(errors='replace')[-800:]}")


def _wait_for_the_late_one(driver: WebDriver, address: str) -> None:
    """Until a peer has been killed and another has come, so that there is something to see."""
    driver.get(address)
    ends_at = time.monotonic() + SECONDS + 60
    while time.monotonic() < ends_at:
        if "of 5 known" in wait_for(driver, "peers-online-sub", 120):
            time.sleep(12)
            return
        time.sleep(1)


def _picture(driver: WebDriver, address: str, ready: str, path: Path, phone: bool) -> None:
    driver.get(address)
    wait_for(driver, ready)
    time.sleep(2.5)  # charts are drawn, then sized
    whole_page(driver, path, phone=phone)


def _deeper(driver: WebDriver, address: str, folder: Path, mode: str) -> None:
    """A peer's page and a round's."""
    driver.get(f"{address}events")
    wait_for(driver, "events")
    driver.find_element(By.XPATH, "//button[normalize-space(.)='exchanges']").click()
    rows = '[data-testid="events"] tbody tr'
    open_round = (
        f"[...document.querySelectorAll('{rows}')].find(row => row.innerText.includes('commit'))?.click()"
    )
    time.sleep(2.5)
    driver.execute_script(open_round)
    wait_for(driver, "round-outcome")
    time.sleep(2.5)
    whole_page(driver, folder / f"round-{mode}.png", phone=mode == "phone")
    driver.get(f"{address}peers")
    wait_for(driver, "peers-count")
    driver.execute_script("document.querySelector('[data-testid=\"peers-table\"] tbody tr').click()")
    wait_for(driver, "peer-title")
    time.sleep(2.5)
    whole_page(driver, folder / f"peer-{mode}.png", phone=mode == "phone")


def _states(folder: Path) -> None:
    shown = {
        "connecting": "nothing-connecting", "empty": "nothing-empty", "gone": "nothing-lost",
        "lost": "banner", "stages": "stages",
    }  # fmt: skip
    for kind, ready in shown.items():
        with board(["-m", "tests.board_server", kind]) as address, browser() as driver:
            _picture(driver, address, ready, folder / f"state-{kind}.png", False)


def _own(folder: Path) -> None:
    """What a peer's own page has besides, and the words."""
    with board(["-m", "tests.board_server", "own"]) as address:
        for mode, options in MODES.items():
            with browser(**options) as driver:
                driver.get(f"{address}peers")
                wait_for(driver, "peers-count")
                driver.find_element(By.CSS_SELECTOR, "[data-testid=ask]").click()
                time.sleep(0.5)
                whole_page(driver, folder / f"own-words-{mode}.png", phone=mode == "phone")
                for name, path, ready in (("own", "", "you"), ("own-peers", "peers", "peers-count")):
                    picture = folder / f"{name}-{mode}.png"
                    _picture(driver, address + path, ready, picture, mode == "phone")


if __name__ == "__main__":
    sys.exit(main())
