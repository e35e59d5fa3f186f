"""What a benchmark times and how it counts: the tests of a command line, the numbers of a row."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM, EngineError
from quengine.config import EngineConfig
from quengine.diagnostics.bench import bench
from quengine.diagnostics.bench.bench import (
    _feed_forward_operations,
    bytes_per_token,
    model_facts,
    prompt_operations,
    run_bench,
)
from quengine.diagnostics.bench.bench_plan import BenchPlan, BenchTest, expand_tests
from quengine.diagnostics.bench.bench_row import BenchRow, ModelFacts
from quengine.diagnostics.bench.bench_time import time_batch
from quengine.diagnostics.bench.profile import PROFILED_STEPS, Traced, read_profile
from quengine.diagnostics.machine import describe_machine
from quengine.errors import CannotRunError
from quengine.kernels.cpu.runtime.threads import max_threads
from quengine.memory import kv_cache_bytes
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.synthetic.synthetic import PRESETS, write_synthetic
from quengine.platform.host_experts import ExpertPlacement, expert_bytes
from quengine.step_plan import StepPlan
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CPU = EngineConfig("cpu")
FACTS = ModelFacts(name="m", path="/m.gguf", nbytes=10**9, params=2 * 10**9, types="Q4_K+Q6_K")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("bench") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def row(test: BenchTest, seconds: tuple[float, ...], bytes_per_token: int = 0) -> BenchRow:
    return BenchRow(
        model=FACTS,
        test=test,
        device="cpu",
        backend="cpu",
        threads=2,
        seconds=seconds,
        bytes_per_token=bytes_per_token,
        bandwidth=20e9,
        load_s=0.5,
        peak_bytes=10**9,
        held_bytes=8 * 10**8,
    )


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512, 0), "pp512"),
        (BenchTest(0, 128), "tg128"),
        (BenchTest(0, 128, 4096), "tg128 @ d4096"),
        (BenchTest(512, 128), "pp512+tg128"),
    ],
)
def test_tests_have_the_names_of_llama_bench(test: BenchTest, name: str) -> None:
    assert test.name == name


def test_every_test_is_run_at_every_depth_and_once() -> None:
    tests = expand_tests([512, 0, 512], [128], [(64, 16)], [0, 1024])
    assert [test.name for test in tests] == [
        *("pp512", "tg128", "pp64+tg16"),
        *("pp512 @ d1024", "tg128 @ d1024", "pp64+tg16 @ d1024"),
    ]


def test_nothing_to_time_is_an_error() -> None:
    with pytest.raises(EngineError, match="nothing to time"):
        expand_tests([0], [0], [], [0])


def test_a_row_counts_tokens_over_seconds_and_their_deviation() -> None:
    measured = row(BenchTest(0, 10), (1.0, 2.0), bytes_per_token=10**9)
    assert measured.samples == (10.0, 5.0)
    assert measured.tok_s == 7.5
    assert measured.deviation == pytest.approx(12.5**0.5)
    assert measured.gb_s == pytest.approx(7.5)
    assert measured.bandwidth_percent == pytest.approx(37.5)


def test_one_sample_has_no_deviation_and_a_prompt_no_bandwidth() -> None:
    measured = row(BenchTest(512, 128), (2.0,))
    assert (measured.tok_s, measured.deviation) == (320.0, 0.0)
    assert measured.gb_s is None
    assert measured.bandwidth_percent is None


def test_a_prompt_is_measured_against_the_matrix_rate_and_tokens_are_not() -> None:
    prompt = replace(row(BenchTest(100, 0), (0.5,)), operations=10**12, matrix_rate=4e12)
    assert prompt.matrix_percent == pytest.approx(50.0)
    assert replace(prompt, matrix_rate=None).matrix_percent is None
    assert replace(row(BenchTest(0, 10), (0.5,), 10**9), matrix_rate=4e12).matrix_percent is None


def test_memory_beside_weights_and_cache_is_told() -> None:
    fields = row(BenchTest(0, 1), (1.0,)).as_dict()
    assert fields["peak_over_weights_and_cache_bytes"] == 2 * 10**8


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_operations_of_a_prompt_are_matrices_attention_and_one_row_of_logits_a_chunk(
    model: Path, backend: str
) -> None:
    """Of 12 tokens in two chunks only two go on behind the attention of the last layer."""
    with LLM(model, "cpu", 64, 1, chunk_size=8, backend=backend) as llm:
        config, operations = llm.model_config, prompt_operations(llm, 5, 12)
        sizes = ModelSizes(embedding=64, feed_forward=128)
        shapes = sizes.tensor_shapes(config.vocab_size)
    last = f"blk.{config.block_count - 1}."
    matrices = 0
    for name, shape in shapes.items():
        if name.startswith("blk.") and len(shape) == 2:
            picked = name.startswith(last) and not name.startswith(f"{last}attn_")
            picked |= name == f"{last}attn_output.weight"
            matrices += 2 * shape[0] * shape[1] * (2 if picked else 12)
    seen = sum(range(6, 18))
    attention = 4 * config.head_count * config.head_dim * seen * config.block_count
    assert operations == matrices + attention + 2 * 2 * config.vocab_size * config.embedding_length


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(PRESETS["qwen2moe-tiny"], vocab_size=300, embedding_length=256, context_length=128)
    return write_synthetic(tmp_path_factory.mktemp("experts") / "experts.gguf", spec)


def test_a_step_reads_the_experts_that_its_rows_are_expected_to_choose(experts: Path) -> None:
    with LLM(experts, "cpu", 64, 1, backend="reference") as llm:
        decoder, config = llm.runner.decoder, llm.model_config.experts
        assert config is not None and (config.count, config.router.used) == (16, 4)
        of_experts = sum(block.ffn.gate_up.nbytes + block.ffn.down.nbytes for block in decoder.blk)
        assert decoder.step_bytes(1) == decoder.bytes_per_token
        alone = decoder.bytes_per_token - of_experts // 4
        for rows in (2, 8, 10**6):
            share = 1 - (1 - 4 / 16) ** rows
            assert decoder.step_bytes(rows) == pytest.approx(alone + share * of_experts, rel=1e-6)
        cache = llm.cache_bytes(3)
        assert bytes_per_token(llm, 0, 6, 8) == decoder.step_bytes(8) // 8 + cache


def test_experts_in_host_memory_are_in_the_row_and_not_among_what_the_device_holds(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is taken for a GPU where experts are placed."""
    choose = ExpertPlacement.choose
    monkeypatch.setattr(
        ExpertPlacement, "choose", lambda config, checkpoint, _: choose(config, checkpoint, "cuda")
    )
    rows = []
    for layers in (0, 1, 99):
        config = EngineConfig("cpu", n_cpu_moe=layers)
        rows += run_bench(
            BenchPlan([experts], [BenchTest(0, 3)], 1, threads=(1,), config=config), lambda _: None
        )
    nowhere, one, _ = rows
    fields = [row.as_dict() for row in rows]
    assert [each["cpu_moe_layers"] for each in fields] == [0, 1, 2]
    first, second = expert_bytes(GGUFCheckpoint(experts).tensors).values()
    assert [each["cpu_moe_bytes"] for each in fields] == [0, first, first + second]
    assert [nowhere.held_bytes - row.held_bytes for row in rows] == [0, first, first + second]
    assert nowhere.placement == "" and nowhere.bandwidth_percent
    assert one.placement.startswith("experts of 1 of 2 layers, ") and one.bandwidth_percent is None
    assert one.bytes_per_token == nowhere.bytes_per_token and one.gb_s


def test_a_model_without_experts_to_place_is_refused_before_anything_runs(model: Path) -> None:
    plan = BenchPlan([model], [BenchTest(8, 0)], config=EngineConfig("cpu", cpu_moe=True))
    told: list[str] = []
    with pytest.raises(EngineError, match=r"--cpu-moe: llama model .* has no experts; leave it out"):
        next(run_bench(plan, told.append))
    assert not told


def test_rows_of_a_step_with_drafts_are_those_of_the_drafted_tokens_too(experts: Path) -> None:
    options = {"draft_model": experts, "draft_tokens": 3}
    plan = BenchPlan(
        [experts],
        [BenchTest(0, 12), BenchTest(4, 4)],
        2,
        (1, 2),
        (1,),
        config=EngineConfig("cpu", **options),  # type: ignore[arg-type]
    )
    alone, prompt, together, _ = run_bench(plan, lambda _: None)
    with LLM(experts, "cpu", 64, 1, **options) as llm:
        decoder, config = llm.runner.decoder, llm.model_config.experts
        assert config is not None and alone.drafts is not None and together.drafts is not None
        assert (
            alone.drafts.drafted == alone.drafts.accepted == 18
        )  # two repetitions of three steps of four tokens
        assert alone.step_rows == 4 and together.step_rows == 8 and prompt.step_rows > 1
        assert alone.as_dict()["experts_read"] == config.expected(4)
        assert together.as_dict()["experts_read"] == config.expected(8)
        drafts = 9 * decoder.bytes_per_token
        assert alone.bytes_per_token == (3 * decoder.step_bytes(4) + drafts) // 12 + llm.cache_bytes(7)
    assert alone.gb_s and together.gb_s is None and prompt.gb_s is None


def test_operations_of_experts_are_those_of_the_chosen_ones(experts: Path) -> None:
    with LLM(experts, "cpu", 64, 1, backend="reference") as llm:
        config, ffn = llm.model_config, llm.runner.decoder.blk[0].ffn
        # Router, four experts of 256, a shared one of 512, each of three matrices.
        assert _feed_forward_operations(config, ffn) == 2 * 256 * (16 + 3 * (4 * 256 + 512))
        assert prompt_operations(llm, 0, 3) > 0


def test_a_row_of_a_mixture_of_experts_tells_what_is_active(experts: Path) -> None:
    with LLM(experts, "cpu", 64, 1, backend="reference") as llm:
        facts = model_facts(llm.loaded.checkpoint)
    assert facts.active_params is not None and facts.active_params < facts.params
    measured = replace(row(BenchTest(0, 4), (1.0,)), model=facts, batch=2).as_dict()
    assert (measured["experts"], measured["experts_used"]) == (16, 4)
    assert measured["experts_read"] == pytest.approx(16 * (1 - 0.75**2))
    assert measured["model_active_params"] == facts.active_params
    dense = row(BenchTest(0, 4), (1.0,)).as_dict()
    assert dense.keys() == measured.keys()  # rows of both kinds are one table of CSV
    assert dense["experts"] is dense["model_active_params"] is dense["experts_read"] is None


def test_a_profile_takes_part_in_a_row_only_when_there_is_one() -> None:
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": 0.0, "dur": 2.0, "args": {"grid": [4, 1, 1]}}]
    measured = row(BenchTest(0, 1), (1.0,))
    assert "profile" not in measured.as_dict()
    fields = replace(measured, profile=(read_profile(events, "decode step", 1),)).as_dict()
    assert fields["profile"][0]["kernels"][0]["name"] == "k"
    assert json.loads(json.dumps(fields))["profile"][0]["wall_us"] == 2.0


def test_every_test_of_a_plan_is_profiled_and_the_trace_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0.0, "dur": 2.0, "args": {"grid": [4, 1, 1]}}
    asked: list[tuple[str, int, int]] = []

    def profiled_prompt(_: LLM, ids: list[int], cached: int) -> Traced:
        asked.append(("prompt", len(ids), cached))
        return read_profile([event], "prompt", 1), {"traceEvents": [event]}

    def profiled_decode(llm: LLM, prompts: list[list[int]]) -> Traced:
        assert llm.ctx_size > len(prompts[0]) + PROFILED_STEPS
        asked.append(("decode step", len(prompts[0]), len(prompts)))
        return read_profile([event], "decode step", 1), {"traceEvents": [event]}

    monkeypatch.setattr(bench, "check_can_profile", lambda _: None)
    monkeypatch.setattr(bench, "profile_prompt", profiled_prompt)
    monkeypatch.setattr(bench, "profile_decode", profiled_decode)
    path = tmp_path / "trace.json"
    tests = [BenchTest(9, 0, 32), BenchTest(0, 3), BenchTest(4, 2)]
    plan = BenchPlan([model], tests, 1, threads=(1,), config=CPU, trace=path)
    rows = list(run_bench(plan, lambda _: None))
    assert [[p.what for p in r.profile] for r in rows] == [
        ["prompt"],
        ["decode step"],
        ["prompt", "decode step"],
    ]
    assert asked == [("prompt", 41, 32), ("decode step", 1, 1), ("prompt", 4, 0), ("decode step", 4, 1)]
    labels = [e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["cat"] == "test"]
    assert labels[-1] == "tiny, 1 threads: pp4+tg2, decode step"
    assert len(labels) == 4


def test_kernels_cannot_be_timed_on_the_cpu_and_that_is_said_before_anything_runs(model: Path) -> None:
    for plan in (
        BenchPlan([model], [BenchTest(8, 0)], config=CPU, profile=True),
        BenchPlan([model], [BenchTest(8, 0)], config=CPU, trace=Path("t.json")),
    ):
        told: list[str] = []
        with pytest.raises(CannotRunError, match="run is on the CPU"):
            next(run_bench(plan, told.append))
        assert told == []


@pytest.mark.parametrize(
    ("test", "plan", "message"),
    [
        (BenchTest(1, 0), {"batches": (1, 0)}, "-b 0: must be at least 1"),
        (BenchTest(1, 0), {"batches": (1, 2), "profile": True}, "time one prompt at a time"),
        (BenchTest(4, 0, 5), {"batches": (2,)}, "-d 5: must be a multiple of 32.*-p 0 times generation"),
    ],
)
def test_what_cannot_be_timed_of_several_sequences_is_refused(
    test: BenchTest, plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        BenchPlan(["m"], [test], **plan)


def test_several_sequences_are_timed_together(model: Path) -> None:
    tests = expand_tests([9], [5], [(4, 2)], [0, 32])
    plan = BenchPlan([model], tests, 2, (1, 3), (1,), config=CPU)
    rows = list(run_bench(plan, lambda _: None))
    assert [(r.batch, r.test) for r in rows] == [(b, test) for b in (1, 3) for test in tests]
    for r in rows:
        assert r.samples[0] == pytest.approx(r.batch * (r.test.prompt + r.test.generate) / r.seconds[0])
        assert (r.gb_s is None) == (r.test.prompt > 0)
    alone, together = (r for r in rows if r.test == BenchTest(0, 5))
    assert together.name == "tg5 x 3" and together.bytes_per_token < alone.bytes_per_token


@pytest.mark.parametrize(
    ("test", "steps"),
    [
        (BenchTest(9, 0), [(0, 9)] * 3),
        (BenchTest(9, 0, 32), [(32, 9)] * 3),
        (BenchTest(0, 5), [3] * 5),
        (BenchTest(0, 5, 20), [3] * 5),
    ],
)
def test_what_is_computed_together_is_what_the_test_says(
    model: Path, monkeypatch: pytest.MonkeyPatch, test: BenchTest, steps: list[object]
) -> None:
    with LLM(model, "cpu", 96, 1, parallel=3) as llm:
        seen: list[object] = []
        launch = llm.runner.launch

        def watched(plan: StepPlan) -> object:
            for chunk in plan.chunks:
                seen.append((chunk.start, len(chunk.ids)))
            if plan.phase == "decode":
                seen.append(len(plan.sequences))
            return launch(plan)

        monkeypatch.setattr(llm.runner, "launch", watched)
        list(time_batch(llm, test, 3, 1, False, lambda _: None))
        # What comes before is not timed: the depth, and the first tokens.
        assert seen[-len(steps) :] == steps
        assert llm.scheduler.cache_used == 0


def test_a_deterministic_run_is_one_and_says_so(model: Path) -> None:
    config = EngineConfig("cpu", deterministic=True)
    plan = BenchPlan([model], [BenchTest(5, 3)], 1, (1, 2), (1,), config=config)
    rows = list(run_bench(plan, lambda _: None))
    assert [row.batch for row in rows] == [1, 2]
    assert all(row.deterministic and row.as_dict()["deterministic"] is True for row in rows)


def test_a_plan_gives_every_row_with_every_sample(model: Path) -> None:
    tests = expand_tests([9], [3], [(4, 2)], [0, 32])
    counts = (1, max_threads())
    plan = BenchPlan([model], tests, 2, threads=counts, config=CPU)
    told: list[str] = []
    rows = list(run_bench(plan, told.append))
    assert [(r.threads, r.test) for r in rows] == [(t, test) for t in counts for test in tests]
    for r in rows:
        assert len(r.samples) == 2
        assert min(r.samples) > 0
        assert r.peak_bytes > model.stat().st_size
        assert (r.gb_s is None) == (r.test.prompt > 0)
    assert told[0].startswith("measuring memory bandwidth")


def test_bytes_of_a_token_are_the_weights_and_the_cache_so_far(model: Path) -> None:
    plan = BenchPlan([model], [BenchTest(0, 4), BenchTest(0, 4, depth=50)], 1, threads=(1,), config=CPU)
    near, far = run_bench(plan, lambda _: None)
    with LLM(model, "cpu", 64, 1) as llm:
        weights, cache = llm.runner.decoder.bytes_per_token, kv_cache_bytes(llm.model_config, 1)
    assert near.bytes_per_token == weights + 2 * cache
    assert far.bytes_per_token == near.bytes_per_token + 50 * cache


def test_a_test_longer_than_the_context_is_refused_before_anything_runs(model: Path) -> None:
    plan = BenchPlan([model], [BenchTest(8, 0), BenchTest(100, 20, depth=32)])
    with pytest.raises(EngineError, match=r"pp100\+tg20 @ d32 takes 153 positions.*128"):
        next(run_bench(plan, lambda _: None))


def test_the_facts_of_a_model_are_counted(model: Path) -> None:
    with LLM(model, "cpu", 16, 1) as llm:
        facts = model_facts(llm.loaded.checkpoint)
    shapes = ModelSizes(embedding=64, feed_forward=128).tensor_shapes(llm.model_config.vocab_size)
    count = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes.values())
    assert (facts.name, facts.types.split("+")[0], facts.params) == ("tiny", "Q8_0", count)


def test_a_result_carries_the_machine_and_the_versions() -> None:
    fields = replace(row(BenchTest(0, 1), (1.0,), 5)).as_dict(describe_machine("cpu"))
    assert fields["samples_s"] == [1.0]
    assert fields["machine"]["cores"] >= 1
    assert fields["machine"]["cpu"]
    assert {"quengine", "torch", "python"} <= fields["versions"].keys()
