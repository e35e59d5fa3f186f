"""`engine ps` and `engine stop` against servers in this process, with fake engines."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from quengine.cli.commands import stop
from quengine.cli.main import run
from quengine.cli.remote import RemoteServer
from tests.engine.serve.models.fake_device import Device, serving_models, spec, states
from tests.engine.serve.serving import KEY, Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_models(Device(), spec("a", 2, "aa"), spec("b", 3), spec("broken")) as running:
        yield running


@pytest.fixture
def url(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ENGINE_URL", served.url.removeprefix("http://"))
    return served.url


def ask(url: str, model: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "hi"}, timeout=120)


def test_ps_lists_what_is_loaded_and_stop_unloads_it(
    served: Served, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ps"]) == 0 and "no model is loaded" in capsys.readouterr().err
    assert ask(url, "aa").status_code == 200 and ask(url, "broken").status_code == 500
    assert run(["ps"]) == 0
    head, a, broken = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NAME", "STATE", "MEMORY"]
    assert a.split()[:6] == ["a", "loaded", "0.00", "GB", "cuda:0", "4096"] and "0 running, 0 queued" in a
    assert broken.split()[:2] == ["broken", "failed"]
    assert run(["ps", "--all", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["a", "b", "broken"]
    assert run(["stop", "a"]) == 0
    assert served.wait_until(lambda: states(served)["a"] == "unloaded")
    capsys.readouterr()
    assert run(["stop", "a"]) == 1 and "the model a is not running" in capsys.readouterr().err
    assert run(["stop", "nope"]) == 1 and "there: a, b, broken" in capsys.readouterr().err


@pytest.mark.usefixtures("url")
def test_stop_ends_the_process_that_listens_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(stop, "ended", lambda *_: bool(sent))
    assert run(["stop"]) == 0 and sent == [(os.getpid(), signal.SIGTERM)]
    assert "has ended" in capsys.readouterr().err
    monkeypatch.setattr(RemoteServer, "get", lambda *_: {"build_info": "b1234"})
    assert run(["stop"]) == 1 and "no server of this program" in capsys.readouterr().err


def test_a_server_with_a_key_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(settings={"api_keys": (KEY,), "access_log": False}) as served:
        assert run(["ps", "--url", served.url]) == 1 and "give --api-key" in capsys.readouterr().err
        assert run(["ps", "--url", served.url, "--api-key", KEY]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["fake", "loaded"]
        monkeypatch.setenv("ENGINE_API_KEY", KEY)
        assert run(["ps", "--url", served.url]) == 0


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (
            "http://127.0.0.1:1",
            2,
            "no server answers at http://127.0.0.1:1: Connection refused; start one with engine serve, or name it",
        ),
        ("ftp://host", 1, "must be as http://127.0.0.1:8080"),
        ("http://host:99999", 1, "must be as"),
    ],
)
def test_an_address_without_a_server_is_one_line(
    given: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ps", "--url", given]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_server_elsewhere_is_not_ended() -> None:
    with pytest.raises(Exception, match="end that server where it runs"):
        RemoteServer("http://192.0.2.1:8080").process()
