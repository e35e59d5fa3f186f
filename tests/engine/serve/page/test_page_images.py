"""Images on the chat page: chosen, pasted, dropped and taken, shown, sent, and there after a reload."""

import base64
import io
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quengine.models.images.decode import decode_image
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.fake_vision import FakeImage, seeing, write_model
from tests.engine.serve.page.driving import (
    act,
    answered,
    ask,
    attach,
    choose,
    menu,
    opened,
    reopened,
    shot,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving

pytestmark = pytest.mark.browser
TO_FILE = """([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), each => each.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const target = document.querySelector("#input");
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: given, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }));
}"""
"""Pastes or drops an image file."""


def prepared(data: bytes) -> FakeImage:
    """Four rows, which the pixels name."""
    digest = sha256(decode_image(data).tobytes()).digest()
    return FakeImage(tuple(32 + byte % 64 for byte in digest[:4]), digest)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_model(tmp_path_factory.mktemp("images") / "m.gguf")
    with (
        seeing(path, ctx_size=512) as (llm, vision),
        serving(lambda: LLMEngine(llm), settings={"model_names": ("tiny",)}) as running,
    ):
        vision.prepare = prepared  # type: ignore[method-assign]
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        choose(made, max_tokens=4)
        made.get_by_role("button", name="Attach files").wait_for()
        yield made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.png and b.jpg, which are sent as they are; large.png; turned.jpg, wide in the file and tall when upright."""
    folder = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (40, 20), (200, 10, 10)).save(folder / "a.png")
    Image.new("RGB", (30, 30), (10, 10, 200)).save(folder / "b.jpg")
    Image.new("RGBA", (5000, 1000), (0, 0, 0, 0)).save(folder / "large.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (3000, 1000), (10, 200, 10)).save(folder / "turned.jpg", exif=exif)
    (folder / "broken.png").write_bytes(b"\x89PNG")
    return folder


def sent(page: Any, text: str) -> list[dict[str, Any]]:
    """The parts of the content that goes to the server with a text."""
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, text) if text else page.get_by_role("button", name="Send").click()
    content = request.value.post_data_json["messages"][-1]["content"]
    assert isinstance(content, list)
    return content


def bytes_of(part: dict[str, Any]) -> bytes:
    assert part["type"] == "image_url"
    return base64.b64decode(part["image_url"]["url"].partition(",")[2])


def test_images_are_chosen_removed_sent_and_kept(page: Any, pictures: Path) -> None:
    attach(page, pictures / "a.png", pictures / "b.jpg", pictures / "a.png")
    chips = page.locator(".chips li")
    chips.nth(2).wait_for()
    assert [image.get_attribute("alt") for image in chips.locator("img").all()] == ["a.png", "b.jpg", "a.png"]
    assert chips.locator("img").first.evaluate("e => e.decode().then(() => e.naturalWidth)") == 40
    chips.nth(0).get_by_role("button", name="Remove a.png").click()
    shot(page, "images-composer")
    parts = sent(page, "which is red?")
    assert parts[2:] == [{"type": "text", "text": "which is red?"}]
    assert [bytes_of(part) for part in parts[:2]] == [
        (pictures / name).read_bytes() for name in ("b.jpg", "a.png")
    ]
    answered(page)
    shown = page.locator(".user .files img")
    assert shown.count() == 2 and chips.count() == 0
    page.reload()
    answered(page)
    assert shown.nth(1).evaluate("e => e.decode().then(() => e.naturalWidth)") == 40
    small = shown.first.bounding_box()["height"]
    page.locator(".user .picture summary").first.click()
    shot(page, "images-conversation")
    assert shown.first.bounding_box()["height"] >= small
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "and blue?")
    turns = request.value.post_data_json["messages"]
    assert [type(turn["content"]) for turn in turns] == [list, str, str] and turns[0]["content"] == parts
    answered(page, 2)


@pytest.mark.parametrize("how", ["paste", "drop"])
def test_an_image_is_pasted_or_dropped_and_goes_alone(page: Any, pictures: Path, how: str) -> None:
    data = (pictures / "a.png").read_bytes()
    page.evaluate(TO_FILE, [how, base64.b64encode(data).decode()])
    page.locator(".chips img").wait_for()
    (part,) = sent(page, "")
    assert bytes_of(part) == data
    answered(page)
    assert page.locator(".chats .title").first.inner_text() == "given.png"


def test_large_images_are_drawn_smaller_and_upright(page: Any, pictures: Path) -> None:
    attach(page, pictures / "large.png", pictures / "turned.jpg")
    page.locator(".chips li").nth(1).wait_for()
    parts = sent(page, "see")
    large, turned = (Image.open(io.BytesIO(bytes_of(part))) for part in parts[:2])
    assert (large.format, large.size, large.getpixel((9, 9))) == ("JPEG", (2048, 410), (255, 255, 255))
    assert (turned.format, turned.size) == ("JPEG", (683, 2048))
    answered(page)


def test_what_is_no_image_is_said_and_a_draft_is_kept(page: Any, pictures: Path) -> None:
    attach(page, pictures / "broken.png", pictures / "b.jpg")
    wait_for_text(page.locator(".notice"), "broken.png: this browser cannot read the image")
    page.locator(".chips img").wait_for()
    page.reload()
    assert page.locator(".chips img").get_attribute("alt") == "b.jpg"
    page.get_by_role("button", name="Remove b.jpg").click()


def test_an_edited_message_keeps_its_images(page: Any, pictures: Path) -> None:
    attach(page, pictures / "a.png")
    page.locator(".chips img").wait_for()
    sent(page, "one")
    answered(page)
    act(page, "user", "Edit")
    assert page.locator(".editor .chips img").count() == 1
    page.locator(".editor textarea").fill("two")
    with page.expect_request("**/v1/chat/completions") as request:
        page.locator(".editor").get_by_role("button", name="Send").click()
    content = request.value.post_data_json["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"] and content[1]["text"] == "two"


def test_images_are_exported_and_imported_and_others_addresses_are_not(
    page: Any, pictures: Path, tmp_path: Path
) -> None:
    attach(page, pictures / "a.png")
    page.locator(".chips img").wait_for()
    sent(page, "one")
    answered(page)
    with page.expect_download() as download:
        menu(page, "More", "Export all chats")
    saved = json.loads(download.value.path().read_text())
    files = page.get_by_label("File of chats")
    text = json.dumps(saved)
    for image, notice in (("https://example.org/a.png", "an image of the file is damaged"), ("", "")):
        changed = text if not image else text.replace(saved_image(saved), image)
        (tmp_path / "chats.json").write_text(changed)
        files.set_input_files(str(tmp_path / "chats.json"))
        if notice:
            wait_for_text(page.locator(".notice"), notice)
            page.get_by_role("button", name="Dismiss").click()
    page.locator(".chats .title").nth(1).wait_for()


def saved_image(saved: dict[str, Any]) -> str:
    messages = saved["chats"][0]["messages"].values()
    return str(next(m["attachments"][0]["image"] for m in messages if m.get("attachments")))


def test_a_picture_is_taken_where_there_is_a_touch_screen(
    browser: Any, served: Served, pictures: Path
) -> None:
    with opened(browser, served.url, has_touch=True, is_mobile=True) as page:
        button = page.get_by_role("button", name="Take a picture")
        button.wait_for()
        with page.expect_file_chooser() as chooser:
            button.click()
        picture = page.get_by_label("Picture", exact=True)
        assert (
            picture.get_attribute("accept") == "image/*" and picture.get_attribute("capture") == "environment"
        )
        chooser.value.set_files(str(pictures / "b.jpg"))
        page.locator(".chips img").wait_for()
        shot(page, "images-phone")


def test_a_mouse_has_no_camera(page: Any) -> None:
    assert not page.get_by_role("button", name="Take a picture").is_visible()
