"""A headless Chromium for the tests of the chat page.

They want a Chromium on PATH (Debian's package `chromium`) and the playwright package (`pip install -e '.[browser]'`),
and are skipped without.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.serve.page.driving import new_tab

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def one_tab(browser: Any) -> Iterator[Any]:
    """For `reopened`."""
    made = new_tab(browser)
    yield made
    made.context.close()
