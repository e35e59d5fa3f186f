"""Slots as llama-server's clients use them: id_slot, saving, restoring and erasing; context shift; no adapters."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from quengine import LLM, EngineError, SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.server_slots import SlotTable
from quengine.serve.routes.dispatch import ModelRoute
from quengine.serve.routes.route import OfModel
from quengine.serve.schemas.errors import ApiError
from quengine.serve.settings import ServerSettings
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import TABLE, Served, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CTX = 160
PROMPT = [(11 * n + 3) % 250 for n in range(100)]
BODY = {
    "prompt": PROMPT,
    "n_predict": 20,
    "temperature": 0,
    "ignore_eos": True,
    "id_slot": 1,
    "return_tokens": True,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "parallel": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(context=CTX, embedding=64, feed_forward=64)
    return write_tiny(tmp_path_factory.mktemp("slots") / "tiny.gguf", sizes=sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def running(path: Path, folder: Path | None) -> Any:
    return serving(lambda: LLMEngine(LLM(path, **OPTIONS)), settings={"slot_save_path": folder})


@pytest.fixture(scope="module")
def served(path: Path, folder: Path) -> Iterator[Served]:
    with running(path, folder) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


def post(client: httpx.Client, path: str, body: Any = None) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, body: Any = None) -> tuple[int, str]:
    answer = client.post(path, json=body)
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message and "Traceback" not in message
    return answer.status_code, message


def test_a_body_that_comes_late_is_not_taken_by_who_watches_for_the_client_to_leave(served: Served) -> None:
    """A server may give each message to whoever asks, in any order: here to the one that asked last."""
    route = next(each for each in TABLE if each.rule == "POST /slots/{id_slot}")
    assert isinstance(route, OfModel)
    waiting: list[asyncio.Future[Message]] = []

    async def receive() -> Message:
        waiting.append(asyncio.get_running_loop().create_future())
        return await waiting[-1]

    async def send(_message: Message) -> None:
        raise AssertionError("nothing is answered")

    async def run() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/slots/1",
            "path_params": {"id_slot": "1"},
            "query_string": b"action=save",
            "headers": [],
        }
        answer = asyncio.create_task(ModelRoute(served.server.models, {"POST": route})(scope, receive, send))
        while not waiting:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # who else asks has asked
        waiting[-1].set_result({"type": "http.request", "body": b'{"filename": ".."}', "more_body": False})
        with pytest.raises(ApiError, match="filename = "):
            await asyncio.wait_for(answer, 10)

    asyncio.run(run())


def test_a_slot_that_was_saved_is_restored_by_another_server(
    path: Path, folder: Path, client: httpx.Client
) -> None:
    first = post(client, "/completion", BODY)
    assert first["id_slot"] == 1 and first["timings"]["cache_n"] == 0
    saved = post(client, "/slots/1?action=save", {"filename": "one.bin"})
    size = (folder / "one.bin").stat().st_size
    assert saved.pop("timings")["save_ms"] > 0
    assert saved == {"id_slot": 1, "filename": "one.bin", "n_saved": 119, "n_written": size}
    assert [file.name for file in folder.iterdir()] == ["one.bin"] and (
        folder / "one.bin"
    ).stat().st_mode & 0o77 == 0
    with running(path, folder) as other, other.http() as fresh:
        restored = post(fresh, "/slots/0?action=restore", {"filename": "one.bin"})
        assert restored.pop("timings")["restore_ms"] > 0
        assert restored == {"id_slot": 0, "filename": "one.bin", "n_restored": 96, "n_read": size}
        again = post(fresh, "/completion", BODY)
        assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (96, 4)
        assert again["tokens"] == first["tokens"]
        assert post(fresh, "/slots/1?action=save", {"filename": "two.bin"})["n_saved"] == 119


def test_an_erased_slot_is_computed_again(client: httpx.Client) -> None:
    post(client, "/completion", BODY)
    assert post(client, "/completion", BODY)["timings"]["cache_n"] == 96
    assert client.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": 119}
    assert post(client, "/slots/1?action=erase") == {"id_slot": 1, "n_erased": 0}
    assert post(client, "/completion", BODY)["timings"]["cache_n"] == 0


def test_a_slot_of_less_than_a_block_keeps_its_tokens(client: httpx.Client) -> None:
    """Its keys and values are computed again, which `n_restored` and `cache_n` say."""
    body = BODY | {"prompt": PROMPT[50:70], "n_predict": 3, "id_slot": 0}
    first = post(client, "/completion", body)
    assert post(client, "/slots/0?action=save", {"filename": "short"})["n_saved"] == 22
    assert post(client, "/slots/0?action=erase") == {"id_slot": 0, "n_erased": 22}
    assert post(client, "/slots/0?action=erase") == {"id_slot": 0, "n_erased": 0}
    assert post(client, "/slots/0?action=restore", {"filename": "short"})["n_restored"] == 0
    assert post(client, "/slots/0?action=save", {"filename": "again"})["n_saved"] == 22
    again = post(client, "/completion", body)
    assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] == 0


@pytest.mark.parametrize(
    ("query", "body", "wrong"),
    [
        ("1?action=save", {"filename": "../x"}, "filename = "),
        ("1?action=save", {"filename": "/etc/x"}, "filename = "),
        ("1?action=save", {"filename": "a\\b"}, "filename = "),
        ("1?action=save", {"filename": ".."}, "filename = "),
        ("1?action=save", {"filename": "x\n"}, "filename = "),
        ("1?action=save", {"filename": "x\0y"}, "filename = "),
        ("1?action=save", {"filename": "."}, "filename = "),
        ("1?action=save", {"filename": "a/../../x"}, "filename = "),
        ("1?action=save", {"filename": "a\u2215x"}, "filename = "),
        ("1?action=save", {"filename": "C:x"}, "filename = "),
        ("1?action=restore", {"filename": "../one.bin"}, "filename = "),
        ("1?action=save", {"filename": ""}, "filename = "),
        ("1?action=save", {"filename": "x" * 256}, "filename = "),
        ("1?action=save", {"filename": "\u00e9" * 200}, "more than 255 bytes"),
        ("1?action=save", {"filename": 7}, "filename = 7"),
        ("1?action=save", {}, "filename must be a file's name"),
        ("1?action=save", [], "must be a JSON object"),
        (
            "1?action=restore",
            {"filename": "absent"},
            "slot 1 cannot be restored from 'absent': there is no such file",
        ),
        ("1?action=burn", {"filename": "x"}, 'action = "burn": must be save, restore, erase'),
        ("1", {"filename": "x"}, "action = null"),
        ("-1?action=erase", None, 'slot "-1"'),
        ("9999999999?action=erase", None, 'slot "9999999999"'),
        ("x?action=erase", None, 'slot "x"'),
    ],
)
def test_what_is_wrong_is_one_line(
    client: httpx.Client, folder: Path, query: str, body: Any, wrong: str
) -> None:
    before = sorted(folder.parent.rglob("*"))
    status, message = refused(client, f"/slots/{query}", body)
    assert status == 400 and wrong in message
    assert sorted(folder.parent.rglob("*")) == before


def test_a_file_that_does_not_fit_or_cannot_be_written(client: httpx.Client, folder: Path) -> None:
    (folder / "damaged").write_bytes(b"\xff" * 100)
    status, message = refused(client, "/slots/0?action=restore", {"filename": "damaged"})
    assert status == 400 and message.startswith("slot 0 cannot be restored from 'damaged': cannot be read")
    (folder / "taken").mkdir()
    (folder / "taken" / "x").touch()
    status, message = refused(client, "/slots/0?action=save", {"filename": "taken"})
    assert status == 500 and message.startswith("slot 0 cannot be saved as 'taken': cannot be written")
    assert post(client, "/completion", BODY)["id_slot"] == 1


def test_only_plain_files_are_read_and_a_link_is_replaced_not_followed(
    client: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        status, message = refused(client, "/slots/0?action=restore", {"filename": name})
        assert status == 400 and "there is no such file" in message
    (tmp_path / "kept").write_text("kept")
    (folder / "link").symlink_to(tmp_path / "kept")
    post(client, "/completion", BODY)
    post(client, "/slots/1?action=save", {"filename": "link"})
    assert (tmp_path / "kept").read_text() == "kept" and not (folder / "link").is_symlink()
    for name in ("CON", "nul", "con.bin"):  # plain names here
        assert post(client, "/slots/1?action=save", {"filename": name})["filename"] == name
        assert (folder / name).is_file()


def test_without_a_folder_there_are_no_actions() -> None:
    with serving() as served, served.http() as client:
        status, message = refused(client, "/slots/0?action=save", {"filename": "x"})
        assert status == 501 and "--slot-save-path" in message
    with pytest.raises(EngineError, match="no such folder"):
        ServerSettings(slot_save_path=Path("/nowhere"))


def test_a_request_waits_for_its_slot_and_others_do_not() -> None:
    with serving(lambda: FakeEngine(step_s=0.005, capacity=2)) as served, served.http() as client:
        with raw_connection(served) as long:
            long.sendall(raw_completion("abc", 4000))
            assert served.wait_until(lambda: served.server.worker.slot_holders != {})
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(
                    post, client, "/completion", {"prompt": "a", "n_predict": 2, "id_slot": 2}
                )
                assert served.wait_until(lambda: served.server.worker.waiting == 1)
                answer = post(client, "/completion", {"prompt": "b", "n_predict": 2})
                assert answer["id_slot"] == 1 and not waiting.done()
                entries = client.get("/slots").json()
                assert [(each["id"], each["is_processing"]) for each in entries] == [(0, True), (1, False)]
                assert entries[0]["n_ctx"] == entries[1]["n_ctx"] == 4096 and entries[1]["id_task"] == -1
                long.close()
                assert waiting.result(120)["id_slot"] == 0
        assert served.server.worker.slot_holders == {}


def test_slots_are_taken_in_turn() -> None:
    table = SlotTable()
    assert [table.take(number, -1, 3) for number in (1, 2, 3, 4)] == [0, 1, 2, None]
    table.release(2)
    table.release(1)
    assert table.take(5, 4, 3) == 1 and table.take(6, 1, 3) is None
    assert table.take(7, -1, 3) == 0 and table.holders == {2: 3, 1: 5, 0: 7}
    for number in (3, 5, 7):
        table.release(number)
    assert [table.take(number, -1, 3) for number in (8, 9)] == [2, 1]


def test_a_shifted_context_is_said_in_the_answer(client: httpx.Client) -> None:
    body = BODY | {"n_predict": 150, "context_shift": True, "n_keep": 40}
    answer = post(client, "/completion", body)
    timings = answer["timings"]
    assert answer["truncated"] and answer["tokens_predicted"] == 150 and answer["stop_type"] == "limit"
    # 159 tokens in the cache, 40 kept: 59 go, and then nothing more is full.
    assert (timings["shift_n"], timings["shift_discarded_n"]) == (2, 118)
    assert answer["tokens_cached"] == 249 - 118 and answer["generation_settings"]["n_keep"] == 40
    assert answer["generation_settings"]["context_shift"] is True
    kept = post(client, "/completion", BODY | {"n_predict": 60})
    left = (PROMPT + kept["tokens"])[:40] + (PROMPT + kept["tokens"])[99:]
    by_hand = post(client, "/completion", BODY | {"prompt": left, "n_predict": 59})
    assert answer["tokens"][:119] == kept["tokens"] + by_hand["tokens"]
    ended = post(client, "/completion", body | {"context_shift": False})
    assert ended["truncated"] and ended["tokens_predicted"] == CTX - 100 and "shift_n" not in ended["timings"]


def test_ollama_and_openai_shift_where_the_server_does(path: Path) -> None:
    settings: dict[str, object] = {"defaults": SamplingParams(context_shift=True, temperature=0)}
    with (
        serving(lambda: LLMEngine(LLM(path, **OPTIONS)), settings=settings) as served,
        served.http() as client,
    ):
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        answer = post(client, "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 100 and answer["timings"]["shift_n"] == 1
        options = {"num_predict": 300, "num_keep": 4, "ignore_eos": True}
        for shift, count in ((None, 300), (False, None)):
            given = {"prompt": "a cat", "raw": True, "stream": False, "options": options, "shift": shift}
            done = post(client, "/api/generate", given)
            assert done["done_reason"] == "length"
            assert done["eval_count"] == (count or CTX - done["prompt_eval_count"])
        refusal = client.post("/completion", json=BODY | {"prompt": [5] * CTX})
        assert refusal.status_code == 400 and refusal.json()["error"]["n_ctx"] == CTX


@pytest.mark.parametrize(
    "body", [{"n_keep": -2}, {"n_discard": -1}, {"n_keep": "x"}, {"id_slot": -2}, {"id_slot": 1.5}]
)
def test_values_out_of_range_are_refused(client: httpx.Client, body: dict[str, Any]) -> None:
    status, message = refused(client, "/completion", BODY | body)
    assert status == 400 and next(iter(body)) in message


def test_there_are_no_adapters_and_properties_stay() -> None:
    with serving() as served, served.http() as client:
        assert client.get("/lora-adapters").json() == []
        for off in ([], [{"id": 0, "scale": 0}], [{"id": 7}]):
            assert post(client, "/lora-adapters", off) == {"success": True}
            assert post(client, "/completion", {"prompt": "a", "n_predict": 1, "lora": off})["stop"]
        status, message = refused(client, "/lora-adapters", [{"id": 0, "scale": 1.0}])
        assert (status, message) == (400, "lora: no adapter 0; the model was loaded without any (--lora)")
        assert refused(client, "/lora-adapters", {}) == (400, "the body must be a JSON array, not an object")
        assert refused(client, "/completion", {"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]})[0] == 400
        assert refused(client, "/props", {}) == (
            501,
            "this server does not support changing global properties",
        )
