"""The verdict on a model that amplifies rounding: a sound side passes, and one that is wrong fails as elsewhere."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine import LLM
from quengine.diagnostics.parity.parity import DEVICE_BUDGETS, REFERENCE_BUDGETS
from quengine.diagnostics.parity.parity_locate import locate
from quengine.diagnostics.parity.parity_metrics import Budget, PhaseMetrics
from quengine.diagnostics.parity.parity_rounding import FACTOR, RoundedSide, round_to, widened
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload, plan_workload
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from tests.engine.diagnostics.test_parity import (
    MODEL,
    TEXT,
    decode_one_position_ahead,
    drop_tail_q4_k,
    frequencies_one_pair_off,
    healthy,
    judged,
    positions_off_by_one_from_the_eighth,
    quiet,
    swap_scales_q4_k,
    swap_scales_q6_k,
)

PHASES = {"prefill", "decode", "greedy"}


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention turns on small differences: the weights of its first norms are four times as large."""
    path = write_synthetic(tmp_path_factory.mktemp("sharp") / "sharp.gguf", MODEL)
    with open_gguf(path) as file:
        norms = [file.tensors[f"blk.{i}.attn_norm.weight"].offset for i in range(MODEL.block_count)]
    for offset in norms:
        weights = np.memmap(path, np.float32, "r+", offset, (MODEL.embedding_length,))
        weights *= 4
        weights.flush()
    return path


@pytest.fixture(scope="module")
def workload(sharp: Path) -> Workload:
    return plan_workload(sharp, [TEXT], prompts=1, tokens=6, window=40)


@pytest.fixture(scope="module")
def reference(sharp: Path, workload: Workload) -> Iterator[LLMSide]:
    with LLM(sharp, "cpu", workload.ctx_size, 1, "reference") as llm:
        yield LLMSide("reference", llm)


def test_a_sound_side_passes_where_the_fixed_budget_would_fail(
    reference: LLMSide, sharp: Path, workload: Workload
) -> None:
    """The sound side does what every one does, to an extent that is the same on every processor: it rounds."""
    with LLM(sharp, "cpu", workload.ctx_size, 1, "reference") as llm:
        rounds_too = RoundedSide(LLMSide("fp16", llm), "prefill")
        rounds_too._bits = 11
        forward, rows = rounds_too.forward(workload.windows[0], 0), reference.forward(workload.windows[0], 0)
        moved = (forward - rows).square().sum(dim=1) / rows.square().sum(dim=1)
    assert float(moved.median()) > REFERENCE_BUDGETS["prefill"].nmse_median
    report = judged(reference, sharp, workload, healthy)
    assert report.failures == []


@pytest.mark.parametrize(
    "spoil",
    [positions_off_by_one_from_the_eighth, frequencies_one_pair_off, decode_one_position_ahead],
)
def test_wrong_positions_fail(
    spoil: Callable[[LLM], None], reference: LLMSide, sharp: Path, workload: Workload
) -> None:
    report = judged(reference, sharp, workload, spoil)
    wrong = PHASES - ({"prefill"} if spoil is decode_one_position_ahead else set())
    assert {failure.partition(":")[0] for failure in report.failures} == wrong
    assert wrong <= report.rounding.keys()


@pytest.mark.parametrize(
    ("tensor", "damage"),
    [
        ("blk.0.ffn_up.weight", swap_scales_q4_k),
        ("blk.1.ffn_gate.weight", drop_tail_q4_k),
        ("blk.2.ffn_down.weight", swap_scales_q6_k),
    ],
)
def test_a_matrix_that_is_read_wrong_fails_and_is_named(
    tensor: str,
    damage: Callable[[np.ndarray], None],
    reference: LLMSide,
    sharp: Path,
    workload: Workload,
    tmp_path: Path,
) -> None:
    wrong = tmp_path / "wrong.gguf"
    shutil.copy(sharp, wrong)
    with open_gguf(sharp) as file:
        rows = np.memmap(wrong, np.uint8, "r+", file.tensors[tensor].offset, file.tensors[tensor].data.shape)
    damage(rows)
    rows.flush()
    report = judged(reference, wrong, workload, healthy)
    assert "decode" in {failure.partition(":")[0] for failure in report.failures}
    with LLM(wrong, "cpu", workload.ctx_size, 1) as llm:
        located = locate(reference, LLMSide("cpu", llm), report, quiet)
    operation = "down+residual" if "down" in tensor else "norm+glu"
    assert [at.first and at.first.place for at in located] == [f"layer {tensor[4]}, {operation}"] * 2


def test_rounding_leaves_the_side_and_its_cache_as_they_were(reference: LLMSide, workload: Workload) -> None:
    ids = workload.windows[0]
    before, cached = reference.forward(ids, 0), reference.cached(0, len(ids))
    rounded = RoundedSide(reference, "prefill")
    moved = rounded.forward(ids[:20], 0)
    assert not torch.equal(moved, before[:20])
    rows = zip(reference.cached(0, len(ids)), cached, strict=True)
    assert all(torch.equal(now, then) for now, then in rows)
    assert not all(map(torch.equal, rounded.cached(0, 20), [rows[:20] for rows in cached]))
    assert torch.equal(reference.forward(ids[20:], 20), before[20:])


def test_a_text_that_is_rounded_goes_on_over_the_rows_that_it_cached_itself(
    reference: LLMSide, workload: Workload
) -> None:
    ids = workload.windows[0]
    whole = RoundedSide(reference, "prefill").forward(ids, 0)
    in_parts = RoundedSide(reference, "prefill")
    first = in_parts.forward(ids[:20], 0)
    reference.forward(ids[20:], 20)  # side a goes on over its own
    rest = in_parts.forward(ids[20:], 20)
    assert float((torch.cat([first, rest]) - whole).square().sum() / whole.square().sum()) < 1e-9


def test_experts_are_those_of_the_side_that_is_rounded(tmp_path: Path) -> None:
    """Another choice of experts would count as what rounding does, and widen the budget by far."""
    path = write_synthetic(tmp_path / "experts.gguf", PRESETS["qwen3moe-tiny"])
    plan = plan_workload(path, [TEXT], prompts=1, tokens=4, window=40)
    with LLM(path, "cpu", plan.ctx_size, 1, "reference") as llm:
        side = LLMSide("reference", llm)
        wrong = judged(side, path, plan, frequencies_one_pair_off)
    assert set(wrong.rounding) == PHASES
    assert all(m.nmse_max < 1e-4 for m in wrong.rounding.values())


@pytest.mark.parametrize("bits", [10, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_keeps_so_many_significant_bits(bits: int, dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=dtype) * 1e3
    rounded = round_to(values, bits)
    assert rounded.dtype == dtype
    assert float(((rounded - values) / values).abs().max()) <= 2.0**-bits
    assert torch.equal(round_to(rounded, bits), rounded)
    steps = torch.frexp(rounded).mantissa.double() * 2.0**bits
    assert torch.equal(steps, steps.round())
    assert torch.equal(round_to(torch.tensor([0.0, 1.0, -2.0]), bits), torch.tensor([0.0, 1.0, -2.0]))


def measured(median: float, p99: float, cached: float = float("nan")) -> PhaseMetrics:
    return PhaseMetrics(1, 0, median, p99, p99, 0, 0, 1, 1, 0, 0, cached, cached, cached)


def test_budgets_are_widened_by_what_rounding_does_and_never_narrowed() -> None:
    budget = DEVICE_BUDGETS["decode"]
    assert widened(budget, measured(1e-12, 1e-12)) == budget
    assert widened(budget, measured(float("nan"), float("inf"))) == budget
    assert widened(budget, measured(1e-8, 1e-12)) == Budget(FACTOR * 1e-8, budget.nmse_p99, budget.nmse_max)
    wide = widened(budget, measured(1e-12, 1e-5))
    assert (wide.nmse_median, wide.nmse_p99) == (budget.nmse_median, FACTOR * 1e-5)
    assert wide.nmse_max == pytest.approx(100 * FACTOR * 1e-5)
    assert widened(budget, measured(1e-12, 1e-12, cached=1e-5)) == wide
