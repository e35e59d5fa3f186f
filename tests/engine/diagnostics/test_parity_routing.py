"""Parity of a mixture of experts: values under the same routing, and the free choices beside them."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine import LLM
from quengine.diagnostics.parity.parity import ParityReport, TextPosition, compare_sides
from quengine.diagnostics.parity.parity_locate import Location, locate
from quengine.diagnostics.parity.parity_metrics import Comparison
from quengine.diagnostics.parity.parity_operations import EXPERT_OPERATIONS
from quengine.diagnostics.parity.parity_routing import Pair, choice_margins
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload, plan_workload
from quengine.kernels.moe.router import Router, chosen
from quengine.kernels.moe.router_kind import RouterKind
from quengine.models.experts import MixtureOfExperts
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.synthetic import PRESETS, SyntheticModel, write_synthetic

LAYERS, EXPERTS, USED = 3, 16, 4
MODEL = SyntheticModel(
    "synthetic routing",
    architecture="qwen2moe",
    vocab_size=512,
    context_length=256,
    embedding_length=256,
    block_count=LAYERS,
    feed_forward_length=256,
    head_count=4,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
    experts=EXPERTS,
    experts_used=USED,
)
OPERATIONS = [name for name in EXPERT_OPERATIONS if name not in ("norm+glu", "down+residual")]
"""Of a layer whose shared expert is one of the others."""

TEXT = "The wheel turns, and 17 x 23 = 391; the old clock does not mind. " * 2


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("routing") / "experts.gguf", MODEL)


@pytest.fixture(scope="module")
def workload(model: Path) -> Workload:
    return plan_workload(model, [TEXT[:66]], prompts=1, tokens=6, window=40)


@pytest.fixture(scope="module")
def reference(model: Path, workload: Workload) -> Iterator[LLMSide]:
    with LLM(model, "cpu", workload.ctx_size, 1, "reference") as llm:
        yield LLMSide("reference", llm)


def routers(llm: LLM) -> list[MixtureOfExperts]:
    return [block.ffn for block in llm.runner.decoder.blk if isinstance(block.ffn, MixtureOfExperts)]


def choose_otherwise(size: float) -> Callable[[LLM], None]:
    """Other experts are chosen, with the same weights as before: a bias of the selection in every layer."""

    def spoil(llm: LLM) -> None:
        for number, ffn in enumerate(routers(llm)):
            random = torch.Generator().manual_seed(number)
            bias = size * torch.randn(EXPERTS, generator=random, dtype=torch.float64)
            ffn.router = replace(ffn.router, selection_bias=bias)

    return spoil


def judged(
    reference: LLMSide,
    path: Path,
    workload: Workload,
    spoil: Callable[[LLM], None] = lambda _: None,
    backend: str = "reference",
) -> ParityReport:
    """The reference against itself, or another backend, after `spoil`."""
    with LLM(path, "cpu", workload.ctx_size, 1, backend) as llm:
        spoil(llm)
        return compare_sides(reference, LLMSide("cpu", llm), workload, quiet)


def test_a_healthy_pair_chooses_alike_at_every_place(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload)
    assert report.failures == []
    positions = sum(map(len, workload.windows))
    for phase in ("prefill", "decode"):
        found = report.routing[phase]
        assert (found.places, found.differing, found.margin) == (LAYERS * positions, 0, 0.0)
        assert found.bound == report.budgets[phase].clear_margin
    # Of the generated text the last token is not computed.
    assert report.routing["greedy"].places == LAYERS * (len(workload.prompts[0]) + 5)


@pytest.mark.parametrize("preset", ["glm4moe-tiny", "gpt-oss-tiny", "granitemoe-tiny", "mixtral-tiny"])
def test_the_cpu_is_within_the_budget_in_every_kind_of_router(preset: str, tmp_path: Path) -> None:
    spec = replace(PRESETS[preset], vocab_size=512, embedding_length=256, context_length=128)
    path = write_synthetic(tmp_path / "experts.gguf", spec)
    short = plan_workload(path, [TEXT[:24]], prompts=1, tokens=3, window=80)
    with LLM(path, "cpu", short.ctx_size, 1, "reference") as llm:
        side = LLMSide("reference", llm)
        report = judged(side, path, short, backend="auto")
    assert report.failures == []
    assert set(report.routing) == {"prefill", "decode", "greedy"}
    # Rounding is there, but other choices are rare.
    assert report.phases["decode"].nmse_median > 1e-12
    assert report.routing["decode"].differing <= 0.05 * report.routing["decode"].places


def test_on_the_cpu_a_choice_at_a_clear_margin_fails_though_every_value_is_right(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    def spoil(llm: LLM) -> None:
        for ffn in routers(llm):
            bias = 0.05 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1))
            ffn.router = replace(ffn.router, selection_bias=bias)

    report = judged(reference, model, workload, spoil, backend="auto")
    assert {failure.partition(":")[0] for failure in report.failures} == {"prefill", "decode", "greedy"}
    assert all("another choice of experts" in failure for failure in report.failures)


def test_values_are_compared_under_the_same_routing_and_small_margins_are_only_reported(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    spoil = choose_otherwise(3e-4)
    report = judged(reference, model, workload, spoil)
    assert report.failures == []
    assert all(metrics.nmse_max < 1e-9 for metrics in report.phases.values())
    found = report.routing["prefill"]
    assert 0 < found.differing < 0.05 * found.places
    assert 0 < found.relative < found.bound
    with LLM(model, "cpu", workload.ctx_size, 1, "reference") as llm:
        spoil(llm)
        ids, free = workload.windows[0], Comparison()
        free.add(reference.forward(ids, 0), LLMSide("cpu", llm).forward(ids, 0))
    assert free.metrics().nmse_max > 1e-5  # what they would be apart by if each chose for itself


def test_a_choice_at_a_clear_margin_fails_though_every_value_is_right(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    report = judged(reference, model, workload, choose_otherwise(0.05))
    assert {failure.partition(":")[0] for failure in report.failures} == {"prefill", "decode", "greedy"}
    assert all("another choice of experts" in failure for failure in report.failures)
    assert all(metrics.nmse_max < 1e-9 for metrics in report.phases.values())
    # Greedy choices of the other experts' logits are explained by them.
    assert all(divergence.near_tie for divergence in report.divergences)


def test_a_router_that_is_wrong_in_one_layer_is_named(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    def spoil(llm: LLM) -> None:
        ffn = routers(llm)[1]
        ffn.router = replace(ffn.router, weight=ffn.router.weight.roll(1, dims=0))

    report = judged(reference, model, workload, spoil)
    found = report.routing["decode"]
    positions = sum(map(len, workload.windows))
    assert found.layer == 1 and found.margin > 0.1
    assert found.differing > 0.5 * positions
    assert any(
        failure.startswith("decode: NMSE") for failure in report.failures
    )  # the weights are wrong as well


def test_nan_in_a_router_fails(reference: LLMSide, model: Path, workload: Workload) -> None:
    def spoil(llm: LLM) -> None:
        ffn = routers(llm)[0]
        ffn.router = replace(ffn.router, weight=ffn.router.weight * float("nan"))

    forced = replace(workload, prompts=[])  # no token could be chosen
    report = judged(reference, model, forced, spoil)
    assert {failure.partition(":")[0] for failure in report.failures} == {"prefill", "decode"}


def test_the_decoder_is_left_as_it_was(reference: LLMSide, workload: Workload) -> None:
    ids = workload.windows[0][:8]
    before = [block.ffn.backend for block in reference.decoder.blk]
    Pair(reference, reference).span(ids, 0, "prefill")
    assert [block.ffn.backend for block in reference.decoder.blk] == before


# -- operation by operation
# -------------------------------------------------------------------------------


def located(
    reference: LLMSide,
    path: Path,
    workload: Workload,
    spoil: Callable[[LLM], None] = lambda _: None,
    backend: str = "reference",
) -> list[Location]:
    with LLM(path, "cpu", workload.ctx_size, 1, backend) as llm:
        spoil(llm)
        b = LLMSide("cpu", llm)
        place = TextPosition(workload.windows[0], 20)
        report = ParityReport("a", "b", {}, {}, {"prefill": place, "decode": place}, [], 0, 0, 0)
        return locate(reference, b, report, quiet)


def test_every_operation_of_a_layer_with_experts_is_compared(
    reference: LLMSide, model: Path, workload: Workload
) -> None:
    for location in located(reference, model, workload, choose_otherwise(0.05)):
        assert location.first is None  # the experts are those of side a
        found = [(o.operation, o.layer) for o in location.operations]
        in_layers = [(name, layer) for layer in range(LAYERS) for name in OPERATIONS]
        assert found[: len(in_layers) + 2] == [("embed", None), *in_layers, ("logits", None)]


def test_a_shared_expert_of_another_size_is_compared_by_itself(workload: Workload, tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "apart.gguf", replace(MODEL, shared_feed_forward_length=512))
    with LLM(path, "cpu", workload.ctx_size, 1, "reference") as llm:
        for location in located(LLMSide("reference", llm), path, workload, choose_otherwise(0.05)):
            assert location.first is None
            operations = [o.operation for o in location.operations if o.layer is not None]
            assert operations == [*EXPERT_OPERATIONS] * LAYERS


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("blk.1.ffn_gate_exps.weight", "layer 1, experts+glu"),
        ("blk.0.ffn_up_exps.weight", "layer 0, experts+glu"),
        ("blk.2.ffn_down_exps.weight", "layer 2, experts+residual"),
        ("blk.1.ffn_gate_inp.weight", "layer 1, route"),
        ("blk.1.ffn_gate_inp_shexp.weight", "layer 1, route"),
        ("blk.0.ffn_up_shexp.weight", "layer 0, experts+glu"),
        ("blk.2.ffn_down_shexp.weight", "layer 2, experts+residual"),
    ],
)
def test_a_wrong_block_of_experts_or_routers_is_found(
    tensor: str, place: str, reference: LLMSide, model: Path, workload: Workload, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.gguf"
    shutil.copy(model, wrong)
    with open_gguf(model) as file:
        found = file.tensors[tensor]
    rows = np.memmap(wrong, np.uint8, "r+", found.offset, (found.nbytes,))
    if found.type_name == "F32":
        rows.view(np.float32)[:] *= 1.01
    else:  # the fp16 scale of the first block of each row: Q4_K begins with it, Q6_K ends with it
        at = {"Q4_K": 0, "Q6_K": 208}[found.type_name]
        size = {"Q4_K": 144, "Q6_K": 210}[found.type_name] * (found.shape[-1] // 256)
        scales = rows.reshape(-1, size)[:, at : at + 2].view(np.float16)
        scales *= 1.1
    rows.flush()
    for location in located(reference, wrong, workload, backend="auto"):
        assert [o.place for o in location.operations if not o.within] == [place]


# -- margins
# -----------------------------------------------------------------------------------------------


def test_the_margin_of_a_choice_is_that_of_the_experts_that_change_places() -> None:
    router = Router(RouterKind(used=2), torch.empty(0))
    logits = torch.tensor([[5.0, 3.0, 2.5, 0.0], [5.0, 3.0, 2.5, 0.0], [1.0, 1.0, 1.0, 1.0]]).double()
    wanted = chosen(logits, router).long()
    taken = torch.tensor([[0, 2], [2, 3], [1, 2]])
    margin, relative = choice_margins(logits, router, wanted, taken)
    # Swapped: the second and third. Both others: from the best left out to the worst taken. Equal logits: none.
    assert margin.tolist() == [0.5, 5.0, 0.0]
    spread = logits[0].std(correction=0)
    assert relative.tolist() == [pytest.approx(0.5 / spread), pytest.approx(5.0 / spread), 0.0]


def test_the_margin_of_sigmoid_scores_with_a_bias_is_in_logits() -> None:
    """Where the bias is the same for all, the difference of two close logits."""
    bias = torch.full((4,), 0.3)
    router = Router(RouterKind(used=1, scores="sigmoid"), torch.empty(0), selection_bias=bias)
    logits = torch.tensor([[0.51, 0.50, -1.0, -2.0]]).double()
    margin, _ = choice_margins(logits, router, torch.tensor([[0]]), torch.tensor([[1]]))
    assert margin.item() == pytest.approx(0.01, rel=1e-4)


def test_a_margin_that_is_no_number_is_infinite() -> None:
    router = Router(RouterKind(used=1), torch.empty(0))
    logits = torch.tensor([[float("nan"), 1.0, 0.0]]).double()
    margin, relative = choice_margins(logits, router, torch.tensor([[0]]), torch.tensor([[1]]))
    assert margin.item() == relative.item() == float("inf")
