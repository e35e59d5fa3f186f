"""Steps that are launched before the results of the one before are known, on a device that computes on the host.

The device of these tests computes a step when it is launched, and says its tokens when they are waited for.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quengine import LLM, EngineError, SamplingParams
from quengine.block_pool import CachePool
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.sampling.sampling import NO_TOKEN
from quengine.kernels.kv.cache_types import blocks_for
from quengine.platform.collector import paused
from quengine.request.adapter_scales import Scales
from quengine.request.output import Completion
from quengine.request.prompt_images import Features, ImagePrompt, ImageRows, PromptImages
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import LaunchedStep
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_keys import padded_rows
from quengine.runners.image_rows import embeds_of
from quengine.runners.static_inputs import DecodeInputs
from quengine.sampler import Result, Sample, Sampler
from quengine.slot import Slot
from quengine.speculative.draft_length import draft_rows
from quengine.speculative.speculation import Speculation
from quengine.step_plan import TOKENS_ALONE, GivenRows, SequenceRows, StepPlan, forward_batch
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_k=0, top_p=1, min_p=0, seed=5, max_tokens=20, ignore_eos=True)
SHARED = list(range(5, 75))
PROMPTS = [
    [7, 8],
    SHARED,
    list(range(100, 163)),
    [*SHARED, 9, 9, 9],
    [11],
    [3, 1, 4, 1, 5, 9, 2, 6] * 11,
    [*SHARED[:33], 200],
    list(range(30, 90)),
]


class End:
    """The end of a step, which is noted when it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._number = log, len(log)

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self._log.append(f"read {self._number}")


def results_of(log: list[str], tokens: list[int], logits: Tensor, on_host: Seq[int]) -> LaunchedStep:
    return torch.tensor(tokens), End(log), {row: logits[row] for row in on_host}  # type: ignore[return-value]


class Device:
    """`CudaGraphs` over the reference backend. `log`: launches, and when the host has read the tokens of each."""

    def __init__(self, llm: LLM) -> None:
        self._decoder, self._cache = llm.loaded.decoder, llm.loaded.cache
        self.rows = padded_rows(max(llm.config.parallel, draft_rows(llm.config, "cpu")))
        self.shares_sequences = llm.config.drafts_on_host
        pools, parallel = len(self._cache.pools), llm.config.parallel
        self.inputs = DecodeInputs(self.rows, parallel, blocks_for(llm.ctx_size), pools, torch.device("cpu"))
        self._samplers: dict[int, Sampler] = {}
        self._histories: dict[int, dict[int, int]] = {}  # tokens by slot and position
        self.log: list[str] = []

    def configure(
        self, slot: int, _kind: Any, _params: Any, sampler: Sampler, ids: list[int], _in_flight: int = 0
    ) -> None:
        self._samplers[slot] = sampler
        self._histories.setdefault(slot, {}).update(enumerate(ids))

    def set_adapters(self, slot: int, scales: Scales | None) -> None:
        self.inputs.set_adapters(slot, scales)

    @torch.no_grad()
    def launch(
        self, slots: list[Slot], given: dict[int, SequenceRows], _kind: Any, on_host: Seq[int] = ()
    ) -> LaunchedStep:
        rows = self.inputs.set_rows(slots, given)
        size = padded_rows(rows)
        self.inputs.send()
        self.inputs.of_slots.tokens.clamp_(min=0)
        assert self._place(size) == rows
        batch = self.inputs.batch(size, rows > len(slots) and size > 1)
        logits = self._decoder.forward(batch, self._cache.layers).float()
        tokens = [self._choose(row, logits[row]) if row < rows else 0 for row in range(size)]
        for row in range(rows):
            target = int(self.inputs.step.targets[row])
            self.inputs.of_slots.tokens[target] = tokens[row]
            self.inputs.of_slots.positions[target] = self.inputs.placed.positions[row] + 1
        self.log.append(f"decode {rows}")
        return results_of(self.log, tokens, logits, on_host)

    @torch.no_grad()
    def prefill(
        self,
        rows: list[SequenceRows],
        slots: list[int],
        _kind: Any,
        on_host: Seq[int] = (),
        given: GivenRows = TOKENS_ALONE,
        configure: Callable[[], None] = lambda: None,
    ) -> LaunchedStep:
        embeds = embeds_of(self._decoder, given)
        batch = forward_batch("prefill", rows, torch.device("cpu"), embeds=embeds)
        logits = self._decoder.forward(batch, self._cache.layers)
        configure()
        tokens = [0] * len(rows)
        for number, (part, slot, row) in enumerate(zip(rows, slots, logits.float(), strict=True)):
            if slot != self.inputs.slots:
                tokens[number] = self._sampled(slot, row, part.end)
                self.inputs.of_slots.tokens[slot] = tokens[number]
                self.inputs.of_slots.positions[slot] = part.end
        self.log.append(f"prompts {sum(len(part.ids) for part in rows)}")
        return results_of(self.log, tokens, logits.float(), on_host)

    def _place(self, rows: int) -> int:
        """`batch_rows.place_rows`; returns how many rows are no padding."""
        step, slots, placed = self.inputs.step, self.inputs.of_slots, self.inputs.placed
        numbers, given = step.slots[:rows].long(), step.tokens[:rows] >= 0
        placed.tokens[:rows] = torch.where(given, step.tokens[:rows], slots.tokens[numbers])
        placed.positions[:rows] = torch.where(given, step.positions[:rows], slots.positions[numbers])
        placed.tables[:, :rows] = slots.tables[:, numbers]
        return int((numbers != self.inputs.slots).sum())

    def _choose(self, row: int, logits: Tensor) -> int:
        """The token after a row; one of no consequence where the host samples."""
        slot = int(self.inputs.step.slots[row])
        position = int(self.inputs.placed.positions[row]) + 1
        return self._sampled(slot, logits, position) if slot in self._samplers else 0

    def _sampled(self, slot: int, logits: Tensor, position: int) -> int:
        sampler, history = self._samplers[slot], self._histories[slot]
        counted = [history.get(at, 0) for at in range(position)] if sampler.params.penalizes else ()
        try:
            history[position] = int(sampler.sample(logits, counted, position).token)
        except EngineError:
            return NO_TOKEN
        return history[position]


def load(model: Path, parallel: int = 4, **options: object) -> LLM:
    return LLM(model, device="cpu", backend="reference", parallel=parallel, threads=1, **options)  # type: ignore[arg-type]


def on_device(llm: LLM) -> Device:
    """Have a model's tokens chosen by a device."""
    device = Device(llm)
    llm.runner.device_decoder = DeviceDecoder(device)  # type: ignore[arg-type]
    launch = llm.runner.launch

    def noted(plan: StepPlan, on_host: bool = False) -> StepPlan:
        wait = launch(plan, on_host).results

        def results() -> list[Result]:
            found = wait()
            if plan.phase == "prefill":
                device.log.append("first tokens")
            return found

        plan.results = results  # type: ignore[method-assign]
        return plan

    llm.runner.launch = noted  # type: ignore[method-assign]
    return device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=192)
    return write_tiny(tmp_path_factory.mktemp("ahead") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    given: SamplingParams = request.param
    return given


@pytest.fixture(scope="module")
def expected(model: Path, params: SamplingParams) -> Iterator[list[Completion]]:
    with load(model, 1) as llm:
        yield llm.generate(PROMPTS, params)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 24}, {"chunk_size": 24, "deterministic": True}])
@pytest.mark.parametrize("blocks", [24, 7])
def test_every_sequence_has_its_own_tokens_whatever_is_launched_ahead(
    model: Path, params: SamplingParams, expected: list[Completion], options: dict[str, object], blocks: int
) -> None:
    with load(model, **options) as llm:
        llm.loaded.cache.pools = (CachePool(blocks),)
        llm.scheduler = llm._make_scheduler()
        on_device(llm)
        got = llm.generate(PROMPTS, params)
        assert [c.tokens for c in got] == [c.tokens for c in expected]
        assert llm.scheduler.blocks.num_used == 0


def test_prompts_and_decode_steps_take_turns_and_none_waits_for_the_results_of_the_last(model: Path) -> None:
    with load(model, chunk_size=32) as llm:
        device = on_device(llm)
        streams = [llm.stream([*range(n, n + 60)], GREEDY) for n in range(3)]
        streams[0].start()
        while not streams[0].sequence.generated:
            llm.step()
        for stream in streams[1:]:
            stream.start()
        device.log.clear()
        while not all(stream.sequence.generated for stream in streams):
            llm.step()
        prompts, decode, first = (
            [number for number, entry in enumerate(device.log) if entry.startswith(kind)]
            for kind in ("prompts", "decode", "first tokens")
        )
        assert len(prompts) == len(first) == 4
        # Behind each chunk come a decode step and the next chunk, and only then are its results read.
        assert all(after < then < read for after, then, read in zip(prompts, decode, first, strict=False))
        assert all(then < after < read for then, after, read in zip(decode, prompts[1:], first, strict=False))
        for stream in streams:
            stream.close()


def test_prompts_with_images_are_launched_ahead_as_those_of_text(model: Path) -> None:
    ids = list(range(40, 100))
    with load(model, chunk_size=32) as llm:
        expected = llm.generate([ids], GREEDY)[0].tokens
        llm.scheduler.reset()
        tensor = llm.loaded.checkpoint.tensors["token_embd.weight"]
        rows = dequantize(tensor.format, tensor.data).view(*tensor.shape)[ids[10:40]]
        images = PromptImages((Features(b"image", rows),), (ImageRows(10, 30, 0, 0),))
        device = on_device(llm)
        stream = llm.stream(ImagePrompt([*ids[:10], *[3] * 30, *ids[40:]], images), GREEDY)
        assert stream.finish().tokens == expected
        assert device.log[:2] == [
            "prompts 32",
            "prompts 28",
        ]  # the second one is launched before the first is read
        assert sum(entry.startswith("decode") for entry in device.log) >= len(expected) - 1


def test_a_burst_of_prompts_is_computed_without_a_wait_for_first_tokens(model: Path) -> None:
    with load(model, 8, chunk_size=64) as llm:
        device = on_device(llm)
        streams = [llm.stream([*range(n, n + 60)], GREEDY) for n in range(4)]
        for stream in streams:
            stream.start()
        llm.step()
        assert device.log[:4] == ["prompts 60", "decode 1", "prompts 60", "read 1"]
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("after", range(1, 12))
def test_what_is_cancelled_while_it_is_under_way_changes_nothing_else(
    model: Path, params: SamplingParams, expected: list[Completion], after: int
) -> None:
    with load(model, chunk_size=24) as llm:
        on_device(llm)
        streams = [llm.stream(prompt, params) for prompt in PROMPTS]
        for stream in streams:
            stream.start()
        for _ in range(after):
            llm.step()
        gone = [*llm.scheduler.prefilling[:1], *llm.scheduler.decoding[:1]]
        for step in llm._in_flight:
            gone += [s for s in step.sequences if s not in gone][:1]
        left = [number for number, stream in enumerate(streams) if stream.sequence not in gone]
        for number, stream in enumerate(streams):
            if number not in left:
                stream.close()
        assert [streams[number].finish().tokens for number in left] == [expected[n].tokens for n in left]
        assert llm.scheduler.blocks.num_used == 0


def test_all_are_cancelled_and_others_come(
    model: Path, params: SamplingParams, expected: list[Completion]
) -> None:
    with load(model, chunk_size=24) as llm:
        on_device(llm)
        for after in range(1, 6):
            streams = [llm.stream(prompt, params) for prompt in PROMPTS[:4]]
            for stream in streams:
                stream.start()
            for _ in range(after):
                llm.step()
            for stream in streams:
                stream.close()
            assert llm.scheduler.blocks.num_used == 0
            assert llm.generate(PROMPTS[5], params)[0].tokens == expected[5].tokens


def test_a_prompt_that_fails_under_way_fails_alone(model: Path) -> None:
    with load(model, chunk_size=24) as llm:
        on_device(llm)
        streams = [llm.stream(prompt, GREEDY) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[5])]

        def poisoned(_logits: Tensor, _history: list[int], position: int) -> Sample:
            raise EngineError(f"token {position} is not finite")

        streams[1].sequence.sampler.sample = poisoned  # type: ignore[method-assign,assignment]
        for stream in streams:
            stream.start()
        with pytest.raises(EngineError, match="token 63 is not finite"):
            streams[1].finish()
        assert all(len(streams[n].finish().tokens) == GREEDY.max_tokens for n in (0, 2))
        assert llm.scheduler.blocks.num_used == 0


def test_a_logits_processor_ends_the_lookahead_of_its_sequence_alone(model: Path) -> None:
    def keep(_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    with load(model, chunk_size=24) as llm:
        alone = [llm.generate(PROMPTS[n], GREEDY)[0].tokens for n in (0, 4)]
        device = on_device(llm)
        streams = [llm.stream([7, 8], GREEDY), llm.stream([11], replace(GREEDY, logits_processors=(keep,)))]
        for stream in streams:
            stream.start()
        while not all(stream.sequence.generated for stream in streams):
            llm.step()
        device.log.clear()
        assert [stream.finish().tokens for stream in streams] == alone
        assert all(stream.sequence.slot.launched == 0 for stream in streams)
        # Both are in every other step, and each step is launched before the results of the one before are read.
        log, launched = device.log, [n for n, entry in enumerate(device.log) if entry.startswith("decode")]
        assert [log[n] for n in launched[:8]] == ["decode 2", "decode 1"] * 4
        assert all(then < log.index(f"read {n + 1}", n) for n, then in pairwise(launched[:16]))


def test_a_step_that_cannot_be_launched_leaves_the_results_of_the_one_before(model: Path) -> None:
    with load(model, chunk_size=24) as llm:
        on_device(llm)
        first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[2], GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0].tokens for prompt in (PROMPTS[0], PROMPTS[2])]
        first.start()
        while len(first.sequence.generated) < 4:
            llm.step()
        second.start()
        launch, failed = llm.runner.launch, list[StepPlan]()

        def fails_once(plan: StepPlan) -> Any:
            if llm._in_flight and not failed:
                failed.append(plan)
                raise MemoryError
            return launch(plan)

        llm.runner.launch = fails_once  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            while True:
                llm.step()
        assert llm.scheduler.current is failed[0]
        llm.scheduler.retry_alone()
        assert [first.finish().tokens, second.finish().tokens] == alone


def test_results_that_are_lost_are_computed_again(model: Path) -> None:
    """Also where the next step, which goes on from them, is in flight."""
    with load(model, chunk_size=24) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].tokens for prompt in (PROMPTS[0], PROMPTS[2])]
        on_device(llm)
        streams = [llm.stream(PROMPTS[n], GREEDY) for n in (0, 2)]
        for stream in streams:
            stream.start()
        while len(streams[1].sequence.generated) < 4:
            llm.step()

        def fails() -> list[Result]:
            raise RuntimeError("the device has stumbled")

        llm._in_flight[0].results = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="stumbled"):
            llm.step()
        assert len(llm._in_flight) == 1 and llm._in_flight[0].cancelled
        assert [stream.finish().tokens for stream in streams] == alone
        assert llm.scheduler.blocks.num_used == 0


def test_the_step_after_a_prompt_is_launched_before_its_first_token_is_read(model: Path) -> None:
    """But not where the host samples that token: another prompt is launched then."""
    with load(model, chunk_size=32) as llm:
        device = on_device(llm)
        stream = llm.stream(PROMPTS[2], GREEDY)
        stream.start()
        while not stream.sequence.generated:
            llm.step()
        assert device.log.index("read 1") < device.log.index("first tokens"), "no more than two steps ahead"
        launched = [entry for entry in device.log if not entry.startswith("read")]
        assert launched == ["prompts 32", "prompts 31", "first tokens", "decode 1", "first tokens"]
        stream.close()
        device.log.clear()
        streams = [llm.stream(PROMPTS[n], replace(GREEDY, logprobs=1)) for n in (5, 7)]
        for each in streams:
            each.start()
        while not streams[1].sequence.generated:
            llm.step()
        ahead = device.log[: device.log.index("decode 1")]
        assert ahead.count("first tokens") == 3 and len([e for e in ahead if e.startswith("prompts")]) == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_is_freed_once_the_next_one_is_committed(model: Path, ahead: bool) -> None:
    """And its logits with it, however long the garbage collector does not run."""
    with load(model, chunk_size=24) as llm:
        if ahead:
            llm.runner.device_decoder = DeviceDecoder(Device(llm))  # type: ignore[arg-type]
        launch, steps = llm.runner.launch, list[ReferenceType[StepPlan]]()

        def noted(plan: StepPlan) -> StepPlan:
            steps.append(ref(plan))
            return launch(plan)

        llm.runner.launch = noted  # type: ignore[method-assign,assignment]
        with paused():
            for params in (GREEDY, replace(GREEDY, logprobs=1)):
                llm.generate(PROMPTS[:3], params)
            left = [step for each in steps if (step := each()) is not None]
        assert len(steps) > 40 and left == [llm.scheduler.current]


def test_a_token_is_all_that_is_computed_where_no_more_are_wanted(model: Path) -> None:
    with load(model) as llm:
        device = on_device(llm)
        assert len(llm.generate(PROMPTS[2], replace(GREEDY, max_tokens=1))[0].tokens) == 1
        assert device.log == ["prompts 63", "read 1", "first tokens"]


def test_first_tokens_that_are_lost_are_computed_again(model: Path) -> None:
    with load(model) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].tokens for prompt in (PROMPTS[0], PROMPTS[2])]
        llm.scheduler.reset()
        on_device(llm)
        streams = [llm.stream(PROMPTS[n], GREEDY) for n in (0, 2)]
        for stream in streams:
            stream.start()
        take, lost = llm._commit, list[StepPlan]()

        def stumbles(step: StepPlan) -> Any:
            def fails() -> list[Result]:
                raise RuntimeError("the device has stumbled")

            if step.phase == "prefill" and not lost:
                lost.append(step)
                step.results = fails  # type: ignore[method-assign]
            return take(step)

        llm._commit = stumbles  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="stumbled"):
            while True:
                llm.step()
        assert len(llm._in_flight) == 1 and llm._in_flight[0].cancelled
        assert [stream.finish().tokens for stream in streams] == alone
        assert llm.scheduler.blocks.num_used == 0


def test_constrained_and_logged_texts_beside_others_are_those_alone(
    model: Path, params: SamplingParams, expected: list[Completion]
) -> None:
    """The lookahead ends for their sequences, and for no others."""
    logged = replace(params, logprobs=1)
    with load(model) as llm:
        device = on_device(llm)
        settings = [logged if number % 2 else params for number in range(len(PROMPTS))]
        streams = [llm.stream(prompt, each) for prompt, each in zip(PROMPTS, settings, strict=True)]
        for stream in streams:
            stream.start()
        assert [stream.finish().tokens for stream in streams] == [each.tokens for each in expected]
        launches = [n for n, entry in enumerate(device.log, 1) if entry.startswith("decode")]
        before = [pair for pair in pairwise(launches) if f"read {pair[0]}" not in device.log[: pair[1]]]
        assert len(before) > len(launches) // 3, "steps are launched before the tokens of the last are read"


@pytest.mark.parametrize("blocks", [24, 8])
def test_texts_with_drafts_are_those_without_and_steps_between_drafts_are_launched_ahead(
    model: Path, params: SamplingParams, expected: list[Completion], blocks: int
) -> None:
    with load(model, draft_ngram=2) as llm:
        llm.loaded.cache.pools = (CachePool(blocks),)
        device = on_device(llm)
        llm.scheduler = llm._make_scheduler()
        llm.speculation = Speculation.of(llm.config, llm.scheduler, None, "cpu")
        got = llm.generate(PROMPTS, params)
        assert [c.tokens for c in got] == [c.tokens for c in expected]
        assert sum(c.timings.drafted_tokens for c in got) > 10 and llm.scheduler.blocks.num_used == 0
        launches = [n for n, entry in enumerate(device.log, 1) if entry.startswith("decode")]
        before = [pair for pair in pairwise(launches) if f"read {pair[0]}" not in device.log[: pair[1]]]
        assert len(before) > len(launches) // 8


def test_embeddings_and_scored_prompts_between_others_are_waited_for(model: Path) -> None:
    with load(model, chunk_size=24) as llm:
        alone = llm.embed(PROMPTS[2])
        tokens = llm.generate(PROMPTS[5], GREEDY)[0].tokens
        on_device(llm)
        stream = llm.stream(PROMPTS[5], GREEDY)
        stream.start()
        sequence: Sequence = llm.embedding_sequence(PROMPTS[2], "mean")
        llm.scheduler.add(sequence)
        while not sequence.finished:
            llm.step()
        assert [sequence.embedding()] == alone
        assert stream.finish().tokens == tokens
