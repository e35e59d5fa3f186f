"""The chat page in a headless Chromium, against the fake engine, whose every word is known."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine, FakeModel, expected_tokens
from tests.engine.serve.page.driving import (
    act,
    answered,
    ask,
    attach,
    choose,
    close,
    menu,
    open_settings,
    opened,
    pdf,
    reopened,
    wait_for_text,
)
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine

pytestmark = pytest.mark.browser
MODEL = FakeModel(4096)
PARTIAL = re.compile(r"(w\d+ ){4}")


def words(prompt: str, seed: int, count: int) -> str:
    """The answer to a conversation rendered as `prompt`."""
    return MODEL.decode(expected_tokens(MODEL.encode(prompt, True, False), seed, 0, count)).strip()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    defaults = SamplingParams(max_tokens=12)
    with serving(lambda: FakeEngine(step_s=0.01), settings={"defaults": defaults}) as running:
        yield running


@pytest.fixture
def page(one_tab: Any, served: Served) -> Iterator[Any]:
    with reopened(one_tab, served.url) as made:
        yield made


def titles(page: Any) -> list[str]:
    return list(page.locator(".chats .title").all_inner_texts())


def test_a_message_is_answered_with_the_engines_text_and_its_costs(page: Any) -> None:
    choose(page, seed=3, max_tokens=6)
    ask(page, "hi there")
    assert answered(page).inner_text() == words("user: hi there", 3, 6)
    page.locator(".costs summary").click()
    costs = page.locator(".assistant .costs").inner_text()
    assert re.search(r"6 tokens · [\d.]+ tok/s\s+Prompt 14 .* the limit of tokens · seed 3", costs), costs
    assert page.locator(".user .plain").inner_text() == "hi there"
    ask(page, "and now")
    prompt = f"user: hi there\nassistant: {words('user: hi there', 3, 6)}\nuser: and now"
    spaced = prompt.replace("\nuser", " \nuser")
    assert answered(page, 2).inner_text() in (words(prompt, 3, 6), words(spaced, 3, 6))


def test_an_answer_streams_and_stops_with_escape_and_with_the_button(page: Any, served: Served) -> None:
    choose(page, max_tokens=3000)
    worker = served.server.worker
    stops = (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click)
    for number, stop in enumerate(stops):
        ask(page, "a long one")
        last = page.locator(".assistant").nth(number)  # `.last` is the one before until this one begins
        wait_for_text(last, PARTIAL)
        early = last.locator(".markdown").inner_text().strip()
        stop()
        wait_for_text(last, "Stopped")
        assert served.wait_until(lambda: worker.idle and not worker.stats.slots)
        assert last.locator(".markdown").inner_text().startswith(early)
        assert page.get_by_role("button", name="Send", exact=True).is_visible()


def test_chats_are_kept_opened_renamed_searched_and_deleted(page: Any) -> None:
    for text in ("first chat", "second chat"):
        page.keyboard.press("Alt+n")
        ask(page, text)
        answered(page)
    page.reload()
    wait_for_text(page.locator(".user .plain"), "second chat")
    assert titles(page) == ["second chat", "first chat"]
    page.get_by_role("button", name="first chat", exact=True).click()
    wait_for_text(page.locator(".user .plain"), "first chat")
    menu(page, "Actions on first chat", "Rename")
    page.get_by_label("Name of the chat").fill("Renamed")
    page.keyboard.press("Enter")
    wait_for_text(page.locator(".chats .title"), "Renamed")
    assert sorted(titles(page)) == ["Renamed", "second chat"]
    page.get_by_label("Search chats").fill("FIRST")
    page.get_by_role("button", name="second chat", exact=True).wait_for(state="detached")
    assert titles(page) == ["Renamed"]
    page.get_by_label("Search chats").fill("")
    menu(page, "Actions on Renamed", "Delete")
    page.locator(".empty").wait_for()
    assert titles(page) == ["second chat"]
    page.get_by_role("button", name="Undo").click()
    wait_for_text(page.locator(".chats .title"), "Renamed")


def test_an_answer_goes_on_while_another_chat_is_open(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "a long one")
    text = page.locator(".assistant .markdown")
    wait_for_text(text, PARTIAL)
    page.keyboard.press("Alt+n")
    page.locator(".empty").wait_for()
    page.get_by_role("button", name="a long one", exact=True).click()
    early = text.inner_text().strip()
    assert PARTIAL.match(early)
    page.wait_for_function(
        "length => document.querySelector('.assistant .markdown').innerText.length > length", arg=len(early)
    )
    page.keyboard.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")
    assert text.inner_text().startswith(early)


def test_a_chat_or_message_that_is_deleted_is_answered_no_longer(page: Any, served: Served) -> None:
    choose(page, max_tokens=3000)
    worker = served.server.worker
    ask(page, "a long one")
    wait_for_text(page.locator(".assistant .markdown"), PARTIAL)
    menu(page, "Actions on a long one", "Delete")
    assert served.wait_until(lambda: worker.idle and not worker.stats.slots)
    assert titles(page) == []
    page.get_by_role("button", name="Undo").click()
    wait_for_text(page.locator(".chats .title"), "a long one")


def test_another_tab_has_the_same_chats(page: Any) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    ask(page, "seen in both")
    text = answered(page).inner_text()
    other.get_by_role("button", name="seen in both", exact=True).click()
    wait_for_text(other.locator(".assistant .markdown"), text)
    menu(other, "Actions on seen in both", "Delete")
    page.locator(".empty").wait_for()


def test_edits_and_second_answers_are_branches_and_messages_are_deleted(page: Any) -> None:
    choose(page, max_tokens=3)
    ask(page, "one")
    first = answered(page).inner_text()
    act(page, "assistant", "Regenerate")
    wait_for_text(page.locator(".assistant .branches"), "2/2")
    second = answered(page).inner_text()
    assert second != first
    act(page, "assistant", "Previous version")
    wait_for_text(page.locator(".assistant .markdown"), first)
    act(page, "user", "Edit")
    page.get_by_label("Edit the message").fill("uno")
    page.get_by_role("button", name="Send", exact=True).first.click()
    wait_for_text(page.locator(".user .branches"), "2/2")
    answered(page)
    wait_for_text(page.locator(".user .plain"), "uno")
    act(page, "user", "Previous version")
    wait_for_text(page.locator(".user .plain"), "one")
    assert page.locator(".assistant .markdown").inner_text() == second
    act(page, "user", "Delete")
    wait_for_text(page.locator(".user .plain"), "uno")
    act(page, "assistant", "Edit")
    page.get_by_label("Edit the message").fill("my **words**")
    page.get_by_role("button", name="Save").click()
    wait_for_text(page.locator(".assistant strong"), "words")
    page.reload()
    wait_for_text(page.locator(".assistant strong"), "words")


def test_settings_are_sent_kept_with_the_chat_and_given_back_to_the_server(page: Any) -> None:
    open_settings(page)
    assert page.locator("#temperature").get_attribute("placeholder") == "0.8"
    page.locator("#effort").select_option("none")
    page.keyboard.press("Escape")
    schema = '{"type": "object"}'
    choose(page, temperature=0.5, seed=9, max_tokens=2, system="be brief", stop="END\n\\n\\n", top_k=7)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hi")
    body = sent.value.post_data_json
    assert (body["temperature"], body["seed"], body["max_tokens"], body["top_k"]) == (0.5, 9, 2, 7)
    assert body["stop"] == ["END", "\n\n"] and body["enable_thinking"] is False
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    answered(page)
    choose(page, schema="{oops")
    open_settings(page)
    assert "Not JSON" in page.locator("#schema-help").inner_text()
    close(page)
    ask(page, "under a schema")
    wait_for_text(page.locator(".error"), "The JSON schema of this chat's settings: Not JSON")
    open_settings(page)
    page.locator("#schema").fill(schema)
    page.get_by_role("button", name="Use for new chats").click()
    page.keyboard.press("Escape")
    page.reload()
    page.keyboard.press("Alt+n")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500))
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hi")
    body = sent.value.post_data_json
    assert body["seed"] == 9 and body["response_format"]["json_schema"]["schema"] == json.loads(schema)
    page.locator(
        ".error", has_text="HTTP status 500"
    ).wait_for()  # it has ended: another is not begun beside it
    open_settings(page)
    page.get_by_role("button", name="Server's defaults").click()
    page.locator("dialog").wait_for(state="detached")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Alt+r")
    bare = {"model", "messages", "stream", "stream_options", "return_progress"}
    assert sent.value.post_data_json.keys() == bare


def test_every_sampler_of_the_server_is_offered(page: Any, served: Served) -> None:
    with served.http() as client:
        params = client.get("/props").json()["default_generation_settings"]["params"]
    elsewhere = {"n_predict", "stop", "logit_bias", "n_probs", "n_ctx", "post_sampling_probs"}
    if "mirostat_tau" not in params:
        elsewhere.add("mirostat")
    # Of what is off or for editors: clients look for their names.
    elsewhere |= {"adaptive_target", "adaptive_decay", "min_keep", "lora", "n_indent", "t_max_predict_ms"}
    open_settings(page)
    for name in params.keys() - elsewhere:
        assert page.locator(f"#{name}").is_visible(), name


def test_chats_are_exported_and_imported(page: Any, tmp_path: Path) -> None:
    ask(page, "keep this")
    text = answered(page).inner_text()
    with page.expect_download() as saved:
        menu(page, "More", "Export all chats")
    saved.value.save_as(tmp_path / "chats.json")
    menu(page, "Actions on keep this", "Delete")
    files = page.get_by_label("File of chats")
    files.set_input_files(str(tmp_path / "chats.json"))
    wait_for_text(page.locator(".notice"), "Imported 1 chat")
    assert page.locator(".assistant .markdown").inner_text() == text
    bad = tmp_path / "bad.json"
    for message in ({"id": 3}, {"id": "a", "content": "", "role": "assistant", "calls": [{"id": "b"}]}):
        bad.write_text(json.dumps({"chats": [{"messages": {"a": message}}], "format": "quengine-chats"}))
        files.set_input_files(str(bad))
        wait_for_text(page.locator(".notice"), "Not imported: a message of the file is damaged")
        page.get_by_role("button", name="Dismiss").click()


def test_texts_of_files_and_pdfs_are_sent_and_images_are_refused(page: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk")
    (tmp_path / "report.pdf").write_bytes(pdf("Costs fell"))
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    (tmp_path / "data.bin").write_bytes(b"\xff\xfe\x00")
    attach(page, *(tmp_path / name for name in ("notes.txt", "report.pdf", "cat.png", "data.bin")))
    wait_for_text(page.locator(".notice"), "cat.png: this model does not read images")
    assert "data.bin: not a text file" in page.locator(".notice").inner_text()
    assert page.locator(".chips li").count() == 2
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "sum up")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == (
        "--- file: notes.txt ---\nremember the milk\n--- end of file ---\n\n"
        "--- file: report.pdf ---\nCosts fell\n--- end of file ---\n\nsum up"
    )
    answered(page)
    assert page.locator(".user .files li").count() == 2


def test_the_live_view_shows_speed_batch_queue_and_cache(page: Any) -> None:
    choose(page, max_tokens=3000)
    ask(page, "go on")
    wait_for_text(page.locator("#live"), re.compile(r"[1-9][\d.]* tok/s"))
    page.locator("#live").click()
    page.locator("dialog").wait_for()
    shown = page.locator("dialog dl")
    wait_for_text(shown, "1 of 64 slots")
    assert re.search(r"tok/s.*0 waiting.*% of [\d,]+ tokens", shown.inner_text(), re.DOTALL)
    assert page.locator("dialog .plot polyline").count() == 4
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.keyboard.press("Escape")
    wait_for_text(page.locator(".assistant"), "Stopped")


def test_what_fails_is_shown_and_asked_again(page: Any) -> None:
    ask(page, "please fail")
    wait_for_text(page.locator(".error"), "logits are not finite")
    assert page.get_by_role("button", name="Try again").is_visible()
    assert page.locator(".assistant").count() == 1


def test_the_key_is_asked_for_in_the_page(browser: Any) -> None:
    with serving(settings={"api_keys": ("right",)}) as served, opened(browser, served.url) as page:
        for key in ("wrong", "right"):
            page.locator("dialog input").fill(key)
            page.keyboard.press("Enter")
            if key == "wrong":
                wait_for_text(page.locator(".notice"), "does not take the key")
        wait_for_text(page.locator(".picker"), "fake")
        ask(page, "hi")
        answered(page)
        page.reload()
        ask(page, "again")
        answered(page, 2)
        assert page.locator("dialog").count() == 0


def test_a_model_is_chosen_and_loaded(page: Any) -> None:
    models = [
        {"id": "fake", "status": {"value": "loaded"}},
        {"id": "other", "status": {"value": "unloaded"}},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))

    def load(route: Any) -> None:
        models[1]["status"] = {"value": "loaded"}
        route.fulfill(json={"success": True})

    page.route("**/models/load", load)
    menu(page, "Model: fake", "About this model")
    page.locator("dialog").wait_for()
    page.keyboard.press("Escape")
    menu(page, "Model: fake", "other")
    with page.expect_request("**/models/load") as asked:
        menu(page, "Model: other", "Load other")
    assert asked.value.post_data_json == {"model": "other"}
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hi")
    assert sent.value.post_data_json["model"] == "other"


@pytest.mark.parametrize("sleeps", [False, True])
def test_unload_is_offered_where_the_server_does_it(browser: Any, sleeps: bool) -> None:
    settings = {"sleep_s": 1000.0} if sleeps else {}
    with serving(settings=settings) as served, opened(browser, served.url) as page:
        wait_for_text(page.locator(".picker"), "fake")
        page.get_by_role("button", name="Model: fake", exact=True).click()
        page.get_by_role("menuitem", name="About this model").wait_for()
        offered = page.get_by_role("menuitem", name="Unload fake")
        assert offered.count() == sleeps
        if sleeps:
            offered.click()
            host = served.server.models.hosts[0]
            assert served.wait_until(lambda: host.state == "asleep")


def test_what_a_model_thinks_is_folded_and_is_not_sent_back(browser: Any) -> None:
    says = {
        "user: one": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        "user: one\nassistant: Hello.\nuser: two": "<|channel|>final<|message|>Again.",
    }
    settings = {"defaults": SamplingParams()}
    with (
        serving(lambda: SpeakingEngine(says), settings=settings) as served,
        opened(browser, served.url) as page,
    ):
        ask(page, "one")
        assert answered(page).inner_text() == "Hello."
        thought = page.locator(".thought .markdown")
        assert not thought.is_visible()
        page.locator(".thought summary").click()
        assert thought.inner_text() == "Hm."
        ask(page, "two")
        assert answered(page, 2).inner_text() == "Again."
        page.reload()
        page.locator(".thought").wait_for()
        assert page.locator(".thought").count() == 1
