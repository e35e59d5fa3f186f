"""Parity of whole models: a healthy pair passes, and every side that is wrong in a known way fails.

The negative controls are the errors that quantized engines have had: they leave the text fluent and the
logits wrong. Each is made in one place of one side, on a model with the block formats of a Q4_K_M file.

How long the rest of a comparison takes, by the speed of what is done.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quengine import LLM, CannotRunError, EngineError
from quengine.config import EngineConfig
from quengine.diagnostics.parity.parity import (
    DEVICE_BUDGETS,
    REFERENCE_BUDGETS,
    ParityReport,
    _left,
    budgets_for,
    compare_sides,
)
from quengine.diagnostics.parity.parity_sides import LLMSide, SideSpec, loaded_sides, parse_sides
from quengine.diagnostics.parity.parity_workload import Workload, plan_workload
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.phase import Phase
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.synthetic import SyntheticModel, write_synthetic
from quengine.request.prompt_images import PromptImages

MODEL = SyntheticModel(
    "synthetic parity",
    vocab_size=512,
    context_length=256,
    embedding_length=256,
    block_count=3,
    feed_forward_length=512,
    head_count=4,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
)
TEXT = "The wheel turns, and 17 x 23 = 391; the old clock does not mind."


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("parity") / "healthy.gguf", MODEL)


@pytest.fixture(scope="module")
def workload(model: Path) -> Workload:
    return plan_workload(model, [TEXT], prompts=1, tokens=6, window=40)


@pytest.fixture(scope="module")
def reference(model: Path, workload: Workload) -> Iterator[LLMSide]:
    with LLM(model, "cpu", workload.ctx_size, 1, "reference") as llm:
        yield LLMSide("reference", llm)


def judged(reference: LLMSide, path: Path, workload: Workload, spoil: Callable[[LLM], None]) -> ParityReport:
    """The reference against the CPU's kernels on `path`, after `spoil` has had its way with them."""
    with LLM(path, "cpu", workload.ctx_size, 1) as llm:
        spoil(llm)
        return compare_sides(reference, LLMSide("cpu", llm), workload, quiet)


def healthy(_: LLM) -> None:
    pass


def test_a_healthy_pair_is_within_the_budget(reference: LLMSide, model: Path, workload: Workload) -> None:
    report = judged(reference, model, workload, healthy)
    assert report.failures == []
    assert set(report.phases) == {"prefill", "decode", "greedy"}
    positions = sum(map(len, workload.windows))
    assert [report.phases[name].positions for name in ("prefill", "decode")] == [positions] * 2
    assert report.generated == report.phases["greedy"].positions == 6


def test_the_reference_agrees_with_itself_token_by_token(reference: LLMSide, workload: Workload) -> None:
    """The reference runs every phase in chunks; that is only right while chunks do not change its logits."""
    ids = workload.windows[0]
    whole = reference.forward(ids, 0)
    single = torch.cat([reference.forward([token], at) for at, token in enumerate(ids)])
    assert float((whole - single).square().sum() / whole.square().sum()) < 1e-9


# -- negative controls: wrong bytes
# ------------------------------------------------------------------------------


def swap_nibbles_q4_k(rows: np.ndarray) -> None:
    # Q4_K: d, dmin (2 bytes each), 12 bytes of 6-bit scales and mins, 128 bytes of nibbles.
    quants = rows.reshape(-1, 144)[:, 16:]
    quants[:] = (quants >> 4) | (quants << 4)


def swap_scales_q4_k(rows: np.ndarray) -> None:
    # The low 6 bits of bytes 0 and 1 are the scales of sub-blocks 0 and 1.
    scales = rows.reshape(-1, 144)[:, 4:6]
    low, high = scales & 63, scales & 192
    scales[:] = high | low[:, ::-1]


def drop_tail_q4_k(rows: np.ndarray) -> None:
    # Sub-block 7 of each row's last block: its scale and min have their low nibbles in byte 11, the rest in
    # 3 and 7.
    scales = rows.reshape(len(rows), -1, 144)[:, -1, 4:16]
    scales[:, 11] = 0
    scales[:, [3, 7]] &= 63


def swap_scales_q6_k(rows: np.ndarray) -> None:
    # Q6_K: 128 + 64 bytes of quants, 16 int8 scales, d.
    scales = rows.reshape(-1, 210)[:, 192:208]
    scales[:, [0, 1]] = scales[:, [1, 0]]


@pytest.mark.parametrize(
    ("tensor", "type_name", "damage"),
    [
        ("blk.1.ffn_gate.weight", "Q4_K", swap_nibbles_q4_k),
        ("blk.1.attn_q.weight", "Q4_K", swap_nibbles_q4_k),
        ("blk.0.ffn_up.weight", "Q4_K", swap_scales_q4_k),
        ("blk.2.attn_output.weight", "Q4_K", swap_scales_q4_k),
        ("blk.1.ffn_gate.weight", "Q4_K", drop_tail_q4_k),
        ("blk.0.attn_k.weight", "Q4_K", drop_tail_q4_k),
        ("blk.2.ffn_down.weight", "Q6_K", swap_scales_q6_k),
        ("output.weight", "Q6_K", swap_scales_q6_k),
    ],
)
def test_one_matrix_that_is_read_wrong_fails_in_every_phase(
    tensor: str,
    type_name: str,
    damage: Callable[[np.ndarray], None],
    reference: LLMSide,
    model: Path,
    workload: Workload,
    tmp_path: Path,
) -> None:
    wrong = tmp_path / "wrong.gguf"
    shutil.copy(model, wrong)
    with open_gguf(model) as file:
        found = file.tensors[tensor]
        assert found.type_name == type_name
        offset, shape = found.offset, found.data.shape
    rows = np.memmap(wrong, np.uint8, "r+", offset, shape)
    damage(rows)
    rows.flush()
    report = judged(reference, wrong, workload, healthy)
    assert not report.within
    assert {failure.partition(":")[0] for failure in report.failures} >= {"prefill", "decode", "greedy"}


# -- negative controls: wrong positions
# --------------------------------------------------------------------------


def respin(llm: LLM, change: Callable[[Tensor], Tensor]) -> None:
    """Change the rotary tables [ctx, rope_dim / 2] where they lie, so that whatever reads them sees it."""
    spec = llm.runner.decoder.blk[0].mixer.spec
    for table in (spec.cos, spec.sin):
        table.copy_(change(table.clone()))


def positions_off_by_one_from_the_eighth(llm: LLM) -> None:
    """All positions off by one would cancel, since rotation is relative; a jump does not."""
    respin(llm, lambda table: torch.cat([table[:8], table[9:], table[-1:]]))


def frequencies_one_pair_off(llm: LLM) -> None:
    respin(llm, lambda table: table.roll(1, dims=1))


def decode_one_position_ahead(llm: LLM) -> None:
    """Right in the prompt and right within the answer, but the answer stands one position too far."""
    logits = llm.runner.logits

    def ahead(ids: list[int], start: int, phase: Phase, images: PromptImages | None) -> Tensor:
        return logits(ids, start + (phase == "decode"), phase, images)

    llm.runner.logits = ahead  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("spoil", [positions_off_by_one_from_the_eighth, frequencies_one_pair_off])
def test_rope_that_is_off_by_one_fails_in_every_phase(
    spoil: Callable[[LLM], None], reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload, spoil)
    assert {failure.partition(":")[0] for failure in report.failures} >= {"prefill", "decode", "greedy"}


def test_decode_that_disagrees_with_prefill_on_positions_fails_where_both_meet(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload, decode_one_position_ahead)
    assert {failure.partition(":")[0] for failure in report.failures} == {"decode", "greedy"}


def test_a_norm_with_another_epsilon_fails(reference: LLMSide, model: Path, workload: Workload) -> None:
    def spoil(llm: LLM) -> None:
        for block in llm.runner.decoder.blk:
            block.ffn.norm = replace(block.ffn.norm, eps=1e-2)

    assert not judged(reference, model, workload, spoil).within


def test_greedy_text_that_is_not_of_these_logits_fails(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    """All logits are right; what the user is given is not their largest."""

    class SecondBest(LLMSide):
        def greedy(self, prompt: list[int], count: int) -> list[int]:
            best = super().greedy(prompt, count)
            return [*best[:-1], (best[-1] + 1) % MODEL.vocab_size]

    with LLM(model, "cpu", workload.ctx_size, 1) as llm:
        report = compare_sides(reference, SecondBest("cpu", llm), workload, quiet)
    assert len(report.divergences) == 1
    assert [failure.partition(":")[0] for failure in report.failures] == ["greedy"]


# -- sides and workloads
# -----------------------------------------------------------------------------------------


def test_an_end_token_is_part_of_the_greedy_text(model: Path, workload: Workload) -> None:
    prompt = workload.prompts[0]
    with LLM(model, "cpu", workload.ctx_size, 1) as llm:
        side = LLMSide("cpu", llm)
        tokens = side.greedy(prompt, 6)
        llm.tokenizer = EndsWith(llm.tokenizer, tokens[2])
        llm._sequences = replace(llm._sequences, tokenizer=llm.tokenizer)
        assert side.greedy(prompt, 6) == tokens[: tokens.index(tokens[2]) + 1]


class EndsWith:
    """A tokenizer that takes one more token for the end of a text."""

    def __init__(self, tokenizer: Any, token: int) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = frozenset({token})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_both_sides_are_loaded(model: Path) -> None:
    with loaded_sides(
        SideSpec("reference", model, "reference"),
        SideSpec("cpu", model, "cpu"),
        EngineConfig(ctx_size=32, threads=1),
    ) as sides:
        assert sides.a.decoder.backend.name == "reference"
        assert sides.b.decoder.backend.name != "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can run that side")
def test_a_side_that_cannot_run_here_is_that_error(model: Path) -> None:
    specs = SideSpec("cpu", model, "cpu"), SideSpec("cuda", model, "cuda")
    with pytest.raises(CannotRunError), loaded_sides(*specs, EngineConfig(ctx_size=32, threads=1)):
        pass


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it a machine with that device."""
    monkeypatch.setattr(
        "quengine.diagnostics.parity.parity_sides.choose_device", lambda _: (torch.device(device), [])
    )


@pytest.mark.parametrize(
    ("device", "sides"),
    [("cpu", ("reference", "cpu")), ("cuda:0", ("cpu", "cuda"))],
    ids=["cpu only", "with a gpu"],
)
def test_the_sides_compared_by_default_follow_the_machine(
    device: str, sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device, monkeypatch)
    found = parse_sides(None, None, "m")
    assert tuple(side.device for side in found) == sides
    assert {side.model for side in found} == {"m"}


@pytest.mark.parametrize(
    ("a", "b", "model", "expected"),
    [
        ("cpu", "cuda:1", "m", [("m", "cpu"), ("m", "cuda:1")]),
        ("x.gguf", "y.gguf", None, [("x.gguf", "cpu"), ("y.gguf", "cpu")]),
        ("x.gguf@cuda", "y.gguf@reference", None, [("x.gguf", "cuda"), ("y.gguf", "reference")]),
        ("hf:u/r:Q4_0", "me@home.gguf", None, [("hf:u/r:Q4_0", "cpu"), ("me@home.gguf", "cpu")]),
        ("me@home.gguf@cuda:1", "./cpu", None, [("me@home.gguf", "cuda:1"), ("./cpu", "cpu")]),
        ("x@cpu@cpu", "x@cuda:@cpu", None, [("x@cpu", "cpu"), ("x@cuda:", "cpu")]),
        ("x.gguf", None, "m", [("x.gguf", "cpu"), ("m", "cpu")]),
        (None, "y.gguf", "m", [("m", "cpu"), ("y.gguf", "cpu")]),
        ("reference", "y.gguf", "m", [("m", "reference"), ("y.gguf", "cpu")]),
    ],
)
def test_a_side_is_a_device_a_file_or_a_file_on_a_device(
    a: str | None,
    b: str | None,
    model: str | None,
    expected: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on("cpu", monkeypatch)
    assert [(side.model, side.device) for side in parse_sides(a, b, model)] == expected


@pytest.mark.parametrize(
    ("a", "b", "model", "words"),
    [
        ("cpu", "x.gguf", None, "--a cpu: which model"),
        ("x.gguf", None, None, "--b cpu: which model"),
        ("x.gguf", "y.gguf", "m", "--model m: both sides name a file"),
        ("@cpu", "cpu", "m", "--a @cpu: no file"),
    ],
)
def test_sides_that_do_not_say_which_model_are_an_error(
    a: str | None, b: str | None, model: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("cpu", monkeypatch)
    with pytest.raises(EngineError, match=words):
        parse_sides(a, b, model)


def test_a_side_may_have_its_experts_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on("cpu", monkeypatch)
    a, b = parse_sides("cpu", "m.gguf@cuda:moe", "m")
    assert (a.device, a.cpu_moe) == ("cpu", False)
    assert (b.model, b.device, b.cpu_moe) == ("m.gguf", "cuda", True)


@pytest.mark.parametrize("device", ["cpu:tp2", "cpu:layer2", "cuda:moe"])
def test_a_model_runs_as_the_file_that_it_is_compared_with(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("cpu", monkeypatch)
    a, b = parse_sides(None, f"copy@of@m.gguf@{device}", "m.gguf")
    assert (a.model, b.model) == ("m.gguf", "copy@of@m.gguf")
    assert (a.device, a.ranks, a.split, a.cpu_moe) == (b.device, b.ranks, b.split, b.cpu_moe)


def test_the_reference_has_its_own_budget() -> None:
    assert budgets_for("reference", "cpu") == budgets_for("reference", "cuda") == REFERENCE_BUDGETS
    assert budgets_for("cpu", "cuda") == DEVICE_BUDGETS
    assert (REFERENCE_BUDGETS["decode"].nmse_median, REFERENCE_BUDGETS["decode"].nmse_p99) == (5e-8, 1e-6)
    assert (REFERENCE_BUDGETS["prefill"].nmse_median, REFERENCE_BUDGETS["prefill"].nmse_p99) == (2e-6, 5e-5)
    assert DEVICE_BUDGETS["decode"].nmse_median == 1e-8


class TableSide:
    """A side whose logits and cached rows come from tables; notes what it is asked for."""

    has_experts = False
    encoder = None
    are_states = (False,)
    watchable = False

    def __init__(self, name: str, logits: Tensor, rows: Tensor, **steps: int) -> None:
        self.name = self.device = name
        self.table = logits
        self.rows = rows
        self.steps = steps
        self.cache = torch.zeros_like(rows)
        self.asked: list[tuple[int, int]] = []

    def step(self, phase: Phase) -> int:
        return self.steps[phase]

    def forward(self, ids: list[int], start: int) -> Tensor:
        self.asked.append((len(ids), start))
        self.cache[start : start + len(ids)] = self.rows[start : start + len(ids)]
        return self.table[start : start + len(ids)]

    def cached(self, start: int, end: int) -> list[Tensor]:
        return [self.cache[start:end].clone()]

    def set_cached(self, start: int, end: int, rows: list[Tensor]) -> None:
        self.cache[start:end] = rows[0]

    def greedy(self, *_: object) -> list[int]:
        raise AssertionError("no prompts were given")

    def continuation(self, *_: object) -> Iterator[Tensor]:
        raise AssertionError("no prompts were given")


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(150, 20, generator=generator), torch.randn(150, 2, 8, generator=generator)


def test_sides_are_asked_for_chunks_and_for_single_tokens() -> None:
    logits, rows = tables()
    a = TableSide("reference", logits, rows, prefill=100, decode=100)
    b = TableSide("cpu", logits, rows, prefill=60, decode=1)
    report = compare_sides(a, b, Workload([list(range(150))], [], 1, 1, 150), quiet)
    assert report.within
    assert a.asked == [(100, 0), (50, 100), (64, 0), (64, 64), (22, 128)]
    assert b.asked == [(60, 0), (40, 60), (50, 100), *((1, at) for at in range(150))]


def test_every_step_starts_from_the_cache_of_a_and_wrong_rows_fail() -> None:
    logits, rows = tables()
    wrong = rows.clone()
    wrong[3:6] *= 1.01
    a = TableSide("reference", logits, rows, prefill=50, decode=50)
    b = TableSide("cpu", logits, wrong, prefill=50, decode=1)
    report = compare_sides(a, b, Workload([list(range(150))], [], 1, 1, 150), quiet)
    assert torch.equal(b.cache, rows)
    assert report.phases["decode"].nmse_max == 0
    assert report.phases["decode"].cached_p99 == pytest.approx(1e-4, rel=1e-3)
    assert {tuple(failure.split(":")[:2]) for failure in report.failures} == {
        (phase, " cached keys and values") for phase in ("prefill", "decode")
    }


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_position_of_garbage_among_hundreds_fails(phase: Phase, cache_type: CacheType) -> None:
    """A median and a 99th percentile alone see none of it."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(289, 200, generator=generator)
    rows = torch.zeros(289, 2, 8)
    a = TableSide("reference", logits, rows, prefill=100, decode=100)

    class OneWrong(TableSide):
        def forward(self, ids: list[int], start: int) -> Tensor:
            out = super().forward(ids, start).clone()
            if start <= 211 < start + len(ids) and (len(ids) == 1) == (phase == "decode"):
                out[211 - start] = torch.randn(200, generator=generator)
            return out

    b = OneWrong("cpu", logits, rows, prefill=100, decode=1)
    ids = list(range(289))
    report = compare_sides(a, b, Workload([ids], [], 1, 1, 289), quiet, cache_type)
    assert report.phases[phase].nmse_p99 == 0
    assert {failure.partition(":")[0] for failure in report.failures} == {phase}
    assert report.worst[phase] == (ids, 211)


def test_one_cached_position_of_garbage_among_hundreds_fails() -> None:
    logits = torch.randn(289, 20, generator=torch.Generator().manual_seed(6))
    rows = torch.randn(289, 2, 8, generator=torch.Generator().manual_seed(7))
    wrong = rows.clone()
    wrong[100] = -rows[100]
    a = TableSide("reference", logits, rows, prefill=300, decode=300)
    b = TableSide("cpu", logits, wrong, prefill=300, decode=1)
    report = compare_sides(a, b, Workload([list(range(289))], [], 1, 1, 289), quiet)
    assert report.phases["decode"].cached_p99 == 0
    assert [failure.split(":")[:2] for failure in report.failures] == [
        [phase, " cached keys and values"] for phase in ("prefill", "decode")
    ]


def test_the_worst_place_of_each_phase_is_kept() -> None:
    logits, rows = tables()
    wrong = logits.clone()
    wrong[57] *= 1.5
    a = TableSide("reference", logits, rows, prefill=50, decode=50)
    b = TableSide("cpu", wrong, rows, prefill=50, decode=1)
    # The tables go by position, so position 57 is wrong in the window that has one.
    windows = [list(range(40)), list(range(100, 200))]
    report = compare_sides(a, b, Workload(windows, [], 1, 1, 150), quiet)
    assert report.worst == {"prefill": (windows[1], 57), "decode": (windows[1], 57)}


def test_the_worst_place_of_a_greedy_text_lies_behind_its_prompt(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload, healthy)
    place = report.worst["greedy"]
    prompt = workload.prompts[0]
    assert place.ids[: len(prompt)] == prompt and len(place.ids) == len(prompt) + 6
    assert len(prompt) - 1 <= place.position < len(place.ids) - 1


def test_a_q8_0_cache_widens_the_budgets_of_whole_passes_only() -> None:
    plain, wide = budgets_for("reference", "cpu"), budgets_for("reference", "cpu", "q8_0")
    assert wide.keys() == plain.keys()
    assert all(wide[name].nmse_p99 == pytest.approx(100 * plain[name].nmse_p99) for name in plain)
    coarse = budgets_for("reference", "cpu", "q4_0")
    assert all(coarse[name].nmse_median == pytest.approx(2000 * plain[name].nmse_median) for name in plain)
    assert all(coarse[name].nmse_max <= 0.5 for name in plain)


@pytest.mark.parametrize(
    ("done", "total", "elapsed", "text"),
    [
        (100, 400, 10.0, ", 30 s left of this phase"),
        (1, 50, 14.0, ", 11 min left of this phase"),
        (5, 5, 9.0, ", 0 s left"),
    ],
)
def test_the_rest_is_told_by_the_measured_speed(done: int, total: int, elapsed: float, text: str) -> None:
    assert _left(done, total, elapsed).startswith(text)
