"""When Python's garbage collector runs in a command."""

import gc
from collections.abc import Callable, Iterator

import pytest

from quengine.cli import main
from quengine.platform import collector


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_frozen(freeze: Callable[[], None]) -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    freeze()


@pytest.fixture(autouse=True)
def _freezing(freeze: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", freeze)


def test_what_a_start_made_stays_and_the_rest_is_collected() -> None:
    collector.starting()
    assert gc.isenabled() and gc.get_threshold()[0] == collector.AT_START
    frozen = gc.get_freeze_count()
    kept: list[object] = []
    collector.working()
    assert gc.get_freeze_count() > frozen
    assert all(thing is not kept for thing in gc.get_objects())
    later: list[object] = []
    assert any(thing is later for thing in gc.get_objects())
    assert gc.isenabled() and gc.get_threshold()[0] == collector.AT_WORK


def test_a_command_begins_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(args: list[str]) -> int:
        seen.append((args, gc.get_threshold()[0]))
        raise SystemExit(3)

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr(main.sys, "argv", ["engine", "list"])
    frozen = gc.get_freeze_count()
    with pytest.raises(SystemExit):
        main.main()
    assert seen == [(["list"], collector.AT_START)]
    assert gc.get_freeze_count() > frozen


def test_a_pause_lasts_until_the_last_thread_has_ended_it() -> None:
    one, other = collector.paused(), collector.paused()
    assert gc.isenabled()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()
