"""A stream that is left before its end: whoever had it, its request is computed no further."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from quengine import LLM, SamplingParams
from quengine.request.chat_session import ChatSession
from quengine.step_plan import StepPlan
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1500)
SHORT = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)


@pytest.fixture(scope="module", params=[1, 4])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("left") / "tiny.gguf"
    write_tiny(path, sizes=ModelSizes(embedding=64, feed_forward=128, context=2048))
    with LLM(path, device="cpu", parallel=request.param) as loaded:
        yield loaded


class LeftEarlyError(Exception):
    pass


def by_break(llm: LLM) -> None:
    for _ in llm.stream("the", LONG):
        break


def by_an_error_in_the_loop(llm: LLM) -> None:
    with suppress(LeftEarlyError):
        for _ in llm.stream("the", LONG):
            raise LeftEarlyError


def by_taking_the_first_pieces(llm: LLM) -> None:
    assert len(list(islice(llm.stream("the", LONG), 3))) == 3


def by_a_generator_that_is_closed(llm: LLM) -> None:
    def shouted() -> Iterator[str]:
        for piece in llm.stream("the", LONG):
            yield piece.upper()

    pieces = shouted()
    next(pieces)
    pieces.close()


def by_a_name_that_is_bound_anew(llm: LLM) -> None:
    stream = llm.stream("the", LONG)
    next(stream)
    stream = llm.stream("cat", SHORT)
    del stream


def by_a_stream_that_was_only_queued(llm: LLM) -> None:
    llm.stream("the", LONG).start()


def by_closing_it(llm: LLM) -> None:
    stream = llm.stream("the", LONG)
    next(stream)
    stream.close()
    assert list(stream) == [] and stream.completion.finish_reason == "abort"


def by_a_cycle_that_is_collected(llm: LLM) -> None:
    holder: list[object] = [llm.stream("the", LONG)]
    holder.append(holder)
    next(holder[0])  # type: ignore[call-overload]
    del holder
    gc.collect()


def by_a_chat_that_is_dropped(llm: LLM) -> None:
    next(ChatSession(llm, LONG).ask("the"))


def by_a_thread_that_ends(llm: LLM) -> None:
    thread = threading.Thread(target=by_break, args=(llm,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "leave",
    [
        by_break,
        by_an_error_in_the_loop,
        by_taking_the_first_pieces,
        by_a_generator_that_is_closed,
        by_a_name_that_is_bound_anew,
        by_a_stream_that_was_only_queued,
        by_closing_it,
        by_a_cycle_that_is_collected,
        by_a_chat_that_is_dropped,
        by_a_thread_that_ends,
    ],
)
def test_a_stream_that_is_left_is_computed_no_further(
    llm: LLM, leave: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("zz", SHORT)[0].tokens
    leave(llm)
    launch, steps = llm.runner.launch, list[int]()

    def counted(plan: StepPlan) -> StepPlan:
        steps.append(len(plan.sequences))
        return launch(plan)

    monkeypatch.setattr(llm.runner, "launch", counted)
    assert llm.generate("zz", SHORT)[0].tokens == expected
    assert steps == [1] * 5
    assert llm.scheduler.sequences == []


def test_a_stream_that_is_dropped_while_a_step_runs_is_taken_out_before_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector may do it, in the thread that computes or in another."""
    expected = llm.generate("zz", SHORT)[0].tokens
    streams = [llm.stream("the", LONG)]
    next(streams[0])
    launch, steps = llm.runner.launch, list[int]()

    def dropping(plan: StepPlan) -> StepPlan:
        step = launch(plan)
        streams.clear()
        steps.append(len(plan.sequences))
        return step

    monkeypatch.setattr(llm.runner, "launch", dropping)
    assert llm.generate("zz", SHORT)[0].tokens == expected
    assert len(steps) <= 6 and llm.scheduler.sequences == []


def test_a_stream_that_is_kept_goes_on_where_it_stopped(llm: LLM) -> None:
    whole = llm.generate("the", SHORT)[0].text
    stream = llm.stream("the", SHORT)
    first = next(stream)
    between = llm.generate("zz", SHORT)[0].text
    assert first + "".join(stream) == whole
    assert llm.generate("zz", SHORT)[0].text == between


def test_what_was_left_gives_its_blocks_back(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", sizes=ModelSizes(context=256))
    with LLM(path, device="cpu", parallel=2) as llm:
        for _ in range(20):
            by_break(llm)
        assert llm.scheduler.cache_used == 0
