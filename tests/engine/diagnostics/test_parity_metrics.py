"""The comparison of two streams of logits, on logits made here: the definitions, and what must not pass."""

import math

import pytest
import torch
from torch import Tensor

from quengine.diagnostics.parity import parity_metrics
from quengine.diagnostics.parity.parity_metrics import (
    Budget,
    Comparison,
    compare_greedy,
    nmse_cached,
    paired_blocks,
    percentile,
    position_differences,
)
from quengine.kernels.kv.kv_codes import SCALE_STEP, quantize_rows, unpack_codes

VOCAB = 97
BUDGET = Budget(nmse_median=5e-8, nmse_p99=1e-6, nmse_max=1e-4)


def logits(positions: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(positions, VOCAB, generator=generator, dtype=torch.float64) - 5


def noisy(a: Tensor, nmse: float) -> Tensor:
    """`a` with an error whose NMSE is exactly this at every position."""
    error = torch.randn(a.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return a + error * (a.norm(dim=1, keepdim=True) / error.norm(dim=1, keepdim=True) * nmse**0.5)


def compared(a: Tensor, b: Tensor) -> Comparison:
    comparison = Comparison()
    comparison.add(a, b)
    return comparison


def test_equal_logits_differ_in_nothing() -> None:
    metrics = compared(logits(20), logits(20)).metrics()
    assert (metrics.nmse_max, metrics.kl_p99, metrics.max_difference) == (0, 0, 0)
    assert (metrics.top1, metrics.top5, metrics.positions) == (1, 1, 20)
    assert metrics.excesses(Budget(0, 0, 0)) == []


def test_nmse_is_the_squared_error_over_the_square_of_a() -> None:
    a = logits(5)
    metrics = compared(a, noisy(a, 1e-4)).metrics()
    assert metrics.nmse_median == pytest.approx(1e-4, rel=1e-9)
    assert metrics.nmse_max == pytest.approx(1e-4, rel=1e-9)


def test_a_constant_shift_is_an_error_of_the_logits_and_none_of_the_distribution() -> None:
    a = logits(5)
    metrics = compared(a, a + 1).metrics()
    assert metrics.nmse_max == pytest.approx(float((VOCAB / a.square().sum(dim=1)).max()))
    assert metrics.kl_mean == pytest.approx(0, abs=1e-12)


def test_kl_is_that_of_torch() -> None:
    a, b = logits(7), logits(7, seed=1)
    expected = torch.nn.functional.kl_div(
        b.log_softmax(1), a.log_softmax(1), reduction="none", log_target=True
    ).sum(1)
    assert torch.allclose(position_differences(a, b)[:, 1], expected, rtol=1e-10)


def test_top_1_and_top_5_count_shared_tokens() -> None:
    a = torch.arange(10.0).repeat(2, 1).double()
    b = a.clone()
    b[0, [9, 8]] = b[0, [8, 9]]  # the first two change places: top-5 stays
    b[1, 0] = 100.0  # a new first pushes the fifth out
    rows = position_differences(a, b)
    assert rows[:, 2].tolist() == [0, 0]
    assert rows[:, 3].tolist() == [1.0, 0.8]


def test_percentiles_are_values_that_occurred() -> None:
    values = torch.arange(1, 201, dtype=torch.float64).flip(0)
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (100, 198, 200)
    assert percentile(values[:1], 99) == 200
    assert math.isnan(percentile(values[:0], 50))


def test_the_budget_holds_at_its_limit_and_not_above() -> None:
    a = logits(300)
    assert compared(a, noisy(a, 4.9e-8)).metrics().excesses(BUDGET) == []
    (excess,) = compared(a, noisy(a, 6e-8)).metrics().excesses(BUDGET)
    assert "median 6e-08" in excess


def test_a_few_bad_positions_break_the_p99() -> None:
    a = logits(200)
    b = noisy(a, 1e-9)
    b[:3] = noisy(a[:3], 5e-5)
    (excess,) = compared(a, b).metrics().excesses(BUDGET)
    assert "p99" in excess


def test_one_bad_position_of_many_breaks_the_maximum() -> None:
    a = logits(300)
    b = noisy(a, 1e-9)
    b[7] = noisy(a[7:8], 1.1e-4)[0]
    (excess,) = compared(a, b).metrics().excesses(BUDGET)
    assert excess == "NMSE max 0.00011 is over 0.0001"
    b[7] = noisy(a[7:8], 9e-5)[0]
    assert compared(a, b).metrics().excesses(BUDGET) == []


def test_another_largest_logit_fails_where_the_margin_is_clear_and_only_there() -> None:
    """One logit among very many is wrong, as one row of the output matrix makes it: no NMSE sees that."""
    a = torch.zeros(20, 20_000, dtype=torch.float64)
    a[:, 0], a[:, 1:300] = 40.0, 20.0
    rms = float(a[0].square().mean().sqrt())
    for margin, failures in ((0.8 * BUDGET.clear_margin, 0), (1.2 * BUDGET.clear_margin, 1)):
        b = a.clone()
        a[12, 1] = 40.0 - margin * rms
        b[12, 1] = 40.0 + 1e-6
        metrics = compared(a, b).metrics()
        assert metrics.nmse_max < BUDGET.nmse_p99 and metrics.top1 < 1
        assert metrics.widest_flip == pytest.approx(margin, rel=0.01)
        found = metrics.excesses(BUDGET)
        assert len(found) == failures and all(excess.startswith("top-1 differs") for excess in found)


def test_the_worst_position_is_one_that_fails() -> None:
    a = logits(50)
    b = noisy(a, 1e-9)
    b[3] = noisy(a[3:4], 1e-7)[0]
    assert compared(a, b).worst() == 3
    order = a[20].argsort()
    b[20, order[-2]] = a[20, order[-1]] + 1e-9
    assert compared(a, b).worst() == 20


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_one_logit_that_is_not_finite_fails(value: float, side: int) -> None:
    pair = [logits(50), logits(50)]
    pair[side][17, 3] = value
    metrics = compared(*pair).metrics()
    assert (metrics.not_finite, metrics.nmse_max) == (1, 0)
    assert metrics.excesses(BUDGET) != []


def test_all_positions_broken_fails_on_every_limit() -> None:
    a = logits(4)
    assert len(compared(a, a * math.nan).metrics().excesses(BUDGET)) == 4


def test_nothing_compared_fails() -> None:
    assert Comparison().metrics().excesses(BUDGET) == ["no position was compared"]


def test_a_row_of_zeros_that_is_met_exactly_is_no_error_and_else_infinite() -> None:
    a = torch.zeros(1, 5, dtype=torch.float64)
    assert float(position_differences(a, a)[0, 0]) == 0
    assert float(position_differences(a, a + torch.eye(1, 5))[0, 0]) == math.inf


def test_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    a = logits(40)
    whole = compared(a, noisy(a, 1e-5)).metrics()
    monkeypatch.setattr("quengine.diagnostics.parity.parity_metrics.TILE_ELEMENTS", 3 * VOCAB)
    assert repr(compared(a, noisy(a, 1e-5)).metrics()) == repr(whole)


def test_streams_that_are_cut_differently_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    a = logits(11)
    monkeypatch.setattr("quengine.diagnostics.parity.parity_metrics.TILE_ELEMENTS", 3 * VOCAB)
    pairs = list(paired_blocks(iter(a.split(4)), iter(a.split(1))))
    assert [len(x) for x, _ in pairs] == [3, 3, 3, 2]
    assert all(torch.equal(x, y) for x, y in pairs)
    assert torch.equal(torch.cat([y for _, y in pairs]), a)


def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(ValueError, match="side b"):
        list(paired_blocks([logits(3)], [logits(2)]))


def test_greedy_choices_that_agree_leave_nothing_to_report() -> None:
    a = logits(12)
    result = compare_greedy(0, a.argmax(1).tolist(), [a], a.split(1))
    assert result.divergences == []
    assert result.comparison.metrics().positions == 12


def test_a_near_tie_is_reported_with_its_margin_and_may_pass() -> None:
    a = logits(4)
    a[2, 10], a[2, 20] = 30.0, 29.999
    b = a.clone()
    b[2, 20] = 30.001
    (divergence,) = compare_greedy(3, b.argmax(1).tolist(), [a], [b]).divergences
    assert (divergence.prompt, divergence.index, divergence.token_a, divergence.token_b) == (3, 2, 10, 20)
    assert divergence.margin == pytest.approx(1e-3)
    assert divergence.max_difference == pytest.approx(2e-3)
    assert divergence.first
    assert divergence.near_tie


def test_a_token_that_does_not_follow_from_the_logits_is_too_wide() -> None:
    a = logits(4)
    tokens = a.argmax(1).tolist()
    tokens[1] = int(a[1].argmin())  # as a broken sampler would
    (divergence,) = compare_greedy(0, tokens, [a], [noisy(a, 1e-9)]).divergences
    assert not divergence.near_tie


def test_only_the_first_difference_of_a_text_is_where_it_parts() -> None:
    a = logits(5)
    result = compare_greedy(0, logits(5, seed=3).argmax(1).tolist(), [a], [logits(5, seed=3)])
    assert [d.first for d in result.divergences] == [True, *[False] * (len(result.divergences) - 1)]


def test_cached_rows_are_compared_by_position_and_a_broken_one_is_infinitely_wrong() -> None:
    a = torch.ones(4, 2, 8, dtype=torch.float16)
    b = a.clone()
    b[1] *= 1.5
    b[2, 0, 0] = math.nan
    comparison = compared(logits(4), logits(4))
    comparison.add_cached([a], [b])
    metrics = comparison.metrics()
    assert (metrics.cached_median, metrics.cached_p99) == (0, math.inf)
    found = metrics.excesses(BUDGET)
    assert len(found) == 2 and all(excess.startswith("cached keys and values") for excess in found)


def test_codes_one_apart_are_both_right() -> None:
    a = torch.tensor([[10, -20, 30], [10, -20, 30]], dtype=torch.int8)
    b = torch.tensor([[11, -21, 30], [12, -20, 30]], dtype=torch.int8)
    scales = torch.ones(2, 1)
    of_codes, of_scales = nmse_cached([a, scales], [b, 1.5 * scales])
    assert of_codes.tolist() == [0.0, pytest.approx(1 / 1400)] and of_scales.tolist() == [0.25, 0.25]


def test_values_of_4_bits_that_a_code_parts_are_both_right() -> None:
    """With scales of either sign, or of the next size; not with codes two apart, or a scale three steps off."""
    x = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(1))
    x[:, :, 5::32], x[:, :, 9::32] = 4.0, -4.0
    codes, scales = quantize_rows(x, 4)
    turned = (8 - unpack_codes(codes).int()).clamp(max=15)
    near, far = turned.unflatten(-1, (-1, 2, 16)).unbind(-2)
    other = (near | far << 4).flatten(-2).to(torch.uint8), -scales * (1 + SCALE_STEP)
    assert not any(errors.any() for errors in nmse_cached([codes, scales], other))
    of_values, of_scales = nmse_cached([codes, scales], [codes ^ 32, scales * (1 + 3 * SCALE_STEP)])
    assert of_values.all() and of_scales.all()


@pytest.mark.parametrize("elements", [1, 3 * 64, 2**21])
def test_tensors_that_are_compared_at_once_have_the_errors_of_each(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several shapes and types, codes of 4 and 8 bits with the scales after them, among values and states."""
    monkeypatch.setattr(parity_metrics, "TILE_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(4)
    layers = list[list[list[Tensor]]]()  # the tensors of each layer, of both sides
    for number, bits in enumerate((4, 8, None, 4, None, 8)):
        rows = 0.1 * torch.randn(2, 2, 3, 1, 64, generator=generator).cumsum(0)  # both sides, keys and values
        of_sides = list[list[Tensor]]()
        for keys, values in rows:
            if bits is None:
                of_sides.append([keys[:, :, : 32 + 32 * (number > 2)].half(), values.float()])
                continue
            (codes, scales), (others, further) = quantize_rows(keys, bits), quantize_rows(values, bits)
            of_sides.append([codes, others, scales, further])
        layers.append(of_sides)
    each = [float(error) for layer in layers for errors in nmse_cached(*layer) for error in errors]
    sides = ([tensor for layer in layers for tensor in layer[side]] for side in range(2))
    assert sorted(float(error) for errors in nmse_cached(*sides) for error in errors) == sorted(each)
    assert len(each) == 6 * 2 * 3 + 4 * 2 * 3 and max(each) > 0.01
