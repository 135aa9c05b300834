"""A headless Chromium for tests and screenshots: Debian's ``chromium`` and ``chromium-driver``.

Each browser has an empty profile of its own and makes no request but to the board.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from tests.swarms import ENVIRONMENT, ROOT

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage",  # in a container its 64 MB fill up, and a page hangs
)  # fmt: skip
LOADED_WITHIN_S = 20
"""Each of ``TRIES``."""
TRIES = 4
PHONE = {"width": 390, "height": 844, "pixelRatio": 2}
WIDE = (1280, 900)


def missing() -> str:
    """Why there can be no browser here; "" if there can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not absent:
        return ""
    return f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver (Debian)"


class Browser(webdriver.Chrome):
    def get(self, url: str) -> None:
        """Open a page. Chromium loses such a call now and then, and stays where it was: it is asked again."""
        for tries_left in reversed(range(TRIES)):
            try:
                super().get(url)
                return
            except TimeoutException:
                if not tries_left:
                    raise


@contextmanager
def browser(*, phone: bool = False, dark: bool = False) -> Iterator[WebDriver]:
    """A browser that is gone, with its profile, when the block ends."""
    profile = tempfile.mkdtemp(prefix="p2p-co2-browser-")
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if phone:
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": PHONE})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Browser(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_window_size(*WIDE)
        driver.set_page_load_timeout(LOADED_WITHIN_S)
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


@contextmanager
def board(arguments: list[str]) -> Iterator[str]:
    """A board as a process, ``python`` with ``arguments``; its address."""
    command = [sys.executable, "-u", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("board: "), first
        yield first.removeprefix("board: ").strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        assert process.stdout is not None
        process.stdout.close()


def text_of(driver: WebDriver, test_id: str) -> str:
    """The text of an element by its test id, "" if it is not there."""
    script = "const found = document.querySelector(arguments[0]); return found ? found.innerText : ''"
    return str(driver.execute_script(script, f'[data-testid="{test_id}"]'))  # in one go: pages change


def wait_for(driver: WebDriver, test_id: str, bound_s: float = 120.0) -> str:
    """The element's text as soon as there is some. Raises ``AssertionError`` with what the page says
    instead."""
    ends_at = time.monotonic() + bound_s
    while time.monotonic() < ends_at:
        text = text_of(driver, test_id)
        if text and text != "-":
            return text
        time.sleep(0.1)
    raise AssertionError(
        f"no {test_id} in {bound_s} s: {driver.find_element(By.TAG_NAME, 'body').text[:800]}"
    )


def errors(driver: WebDriver) -> list[str]:
    """What the page complained of."""
    found = driver.get_log("browser")  # type: ignore[no-untyped-call]  # so selenium declares it
    return [entry["message"] for entry in found if entry["level"] == "SEVERE"]


def whole_page(driver: WebDriver, path: Path, *, phone: bool) -> None:
    """A picture of the page from top to bottom."""
    width, scale = (PHONE["width"], 2) if phone else (WIDE[0], 1)
    size = {"width": width, "height": 600, "deviceScaleFactor": scale, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # else the last page's height counts
    size["height"] = max(int(driver.execute_script("return document.documentElement.scrollHeight")), 600)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1.2)  # charts follow the new size
    driver.save_screenshot(str(path))
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
