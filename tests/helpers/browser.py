"""A headless Chromium for tests of the dashboard; skips where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)


@contextmanager
def browser(
    profile: Path, *, size: tuple[int, int] = (1440, 900), dark: bool = False
) -> Iterator[Any]:
    """A selenium driver; everything it logs is kept for ``errors_of``."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        started.set_script_timeout(20)
        yield started
    finally:
        started.quit()


def errors_of(driver: Any, *, of_status: int = 0) -> list[str]:
    """What the page complained of since the last call: scripts that failed, policy violations.

    ``of_status``: answers with it were provoked by the test and are left out.
    """
    lines = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    provoked = f"a status of {of_status} "
    return [line for line in lines if "net::ERR_" not in line and provoked not in line]
