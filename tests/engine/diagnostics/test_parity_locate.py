"""Locating a fault: one thing is made wrong in one place of one side, and exactly that place is named."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine import LLM
from quengine.diagnostics.parity.parity import ParityReport, TextPosition, compare_sides
from quengine.diagnostics.parity.parity_locate import CAPTURED, Location, _Kept, _of_what_is_added, locate
from quengine.diagnostics.parity.parity_operations import LAYER_OPERATIONS, Call, watched
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload
from quengine.kernels.backend import Hidden
from quengine.kernels.cpu.backend import CpuBackend
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.synthetic import SyntheticModel, write_synthetic

LAYERS = 3
MODEL = SyntheticModel(
    "synthetic locate",
    vocab_size=300,
    context_length=128,
    embedding_length=256,
    block_count=LAYERS,
    feed_forward_length=256,
    head_count=4,
    head_count_kv=2,
    head_dim=64,
    rope_freq_base=1e4,
)
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(24)]
WORKLOAD = Workload([IDS], [], 1, 1, 32)


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("locate") / "healthy.gguf", MODEL)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[LLMSide]:
    with LLM(model, "cpu", WORKLOAD.ctx_size, 1, "reference") as llm:
        yield LLMSide("reference", llm)


def located(
    reference: LLMSide, path: Path, spoil: Callable[[LLM], None] = lambda _: None
) -> dict[str, Location]:
    with LLM(path, "cpu", WORKLOAD.ctx_size, 1) as llm:
        spoil(llm)
        b = LLMSide("cpu", llm)
        found = locate(reference, b, compare_sides(reference, b, WORKLOAD, quiet), quiet)
    return {location.phase: location for location in found}


def first_places(found: dict[str, Location]) -> dict[str, str | None]:
    return {phase: location.first and location.first.place for phase, location in found.items()}


def double_one_super_scale(model: Path, tensor: str, to: Path) -> Path:
    """The file with the fp16 scale of one block doubled: 256 weights of one row."""
    shutil.copy(model, to)
    with open_gguf(model) as file:
        found = file.tensors[tensor]
        offset, shape, block = found.offset, found.data.shape, {"Q4_K": 144, "Q6_K": 210}[found.type_name]
    rows = np.memmap(to, np.uint8, "r+", offset, shape)
    # Q4_K begins with d, Q6_K ends with it.
    at = 0 if block == 144 else block - 2
    scale = rows[5, at : at + 2].view(np.float16)
    scale *= 2
    rows.flush()
    return to


def test_a_healthy_pair_has_every_operation_of_every_layer_within_its_budget(
    reference: LLMSide, model: Path
) -> None:
    found = located(reference, model)
    assert first_places(found) == {"prefill": None, "decode": None}
    layers = [(o.operation, o.layer) for o in found["prefill"].operations]
    in_layers = [(name, layer) for layer in range(LAYERS) for name in LAYER_OPERATIONS]
    assert layers == [("embed", None), *in_layers, ("logits", None)]
    assert found["decode"].operations[-1].operation == CAPTURED
    # In decode activations are rounded; a comparison of a run with itself would give zeros.
    assert all(o.nmse > 1e-12 for o in found["decode"].operations if o.operation == "norm+qkv")


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("blk.1.attn_q.weight", "layer 1, norm+qkv"),
        ("blk.0.attn_v.weight", "layer 0, norm+qkv"),
        ("blk.2.attn_output.weight", "layer 2, output+residual"),
        ("blk.1.ffn_up.weight", "layer 1, norm+glu"),
        ("blk.2.ffn_down.weight", "layer 2, down+residual"),
        ("output.weight", "logits"),
    ],
)
def test_one_scale_of_one_block_is_found(
    tensor: str, place: str, reference: LLMSide, model: Path, tmp_path: Path
) -> None:
    wrong = double_one_super_scale(model, tensor, tmp_path / "wrong.gguf")
    found = located(reference, wrong)
    assert first_places(found) == {"prefill": place, "decode": place}
    for location in found.values():
        assert [o.place for o in location.operations if not o.within] == [place]


def test_a_wrong_row_of_the_embedding_is_found(reference: LLMSide, model: Path, tmp_path: Path) -> None:
    # Row 5 of the table is the row of token 5, which must be in the text to be seen.
    wrong = double_one_super_scale(model, "token_embd.weight", tmp_path / "wrong.gguf")
    report = placed(TextPosition([5, *IDS], 8))
    with LLM(wrong, "cpu", WORKLOAD.ctx_size, 1) as llm:
        prefill, _ = locate(reference, LLMSide("cpu", llm), report, quiet)
    assert prefill.first is not None and prefill.first.place == "embed"


def placed(place: TextPosition) -> ParityReport:
    """A report that says no more than where to look."""
    return ParityReport("reference", "cpu", {}, {}, {"prefill": place, "decode": place}, [], 0, 0, 0)


def test_wrong_rotation_is_the_first_layers_attention(reference: LLMSide, model: Path) -> None:
    def spoil(llm: LLM) -> None:
        spec = llm.runner.decoder.blk[0].mixer.spec
        for table in (spec.cos, spec.sin):
            table.copy_(table.roll(1, dims=1))

    found = located(reference, model, spoil)
    assert first_places(found) == dict.fromkeys(("prefill", "decode"), "layer 0, attention")
    wrong = {o.operation for location in found.values() for o in location.operations if not o.within}
    assert wrong == {"attention"}
    assert all(o.cached > 1e-3 for o in found["decode"].operations if o.cached is not None)


def test_an_operation_that_gives_nan_is_found(
    reference: LLMSide, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swiglu = CpuBackend.norm_glu

    def broken(self: CpuBackend, x: object, *rest: object) -> object:
        result = swiglu(self, x, *rest)  # type: ignore[arg-type]
        return result * float("nan") if isinstance(result, torch.Tensor) else result

    monkeypatch.setattr(CpuBackend, "norm_glu", broken)
    assert first_places(located(reference, model))["decode"] == "layer 0, norm+glu"


def test_a_recorded_step_that_is_not_its_operations_is_found(reference: LLMSide, model: Path) -> None:
    def spoil(llm: LLM) -> None:
        logits = llm.runner.logits
        llm.runner.logits = lambda ids, start, phase, images: (  # type: ignore[method-assign]
            logits(ids, start, phase, images) * (1.001 if phase == "decode" else 1.0)
        )

    found = located(reference, model, spoil)
    assert first_places(found) == {"prefill": None, "decode": CAPTURED}


def test_the_chunk_reaches_up_to_where_the_report_is_worst(reference: LLMSide, model: Path) -> None:
    place = TextPosition(IDS, 17)
    with LLM(model, "cpu", WORKLOAD.ctx_size, 1, chunk_size=16) as llm:
        prefill, decode = locate(reference, LLMSide("cpu", llm), placed(place), quiet)
    assert (prefill.start, prefill.end) == (16, 18)
    assert (decode.start, decode.end) == (17, 18)
    assert prefill.first is decode.first is None


def test_watching_leaves_the_decoder_as_it_was(reference: LLMSide) -> None:
    seen = []

    def watch(call: Call) -> Hidden:
        seen.append(call.operation)
        return call.run(*call.inputs)

    before = reference.eager(IDS, 0)
    with watched(reference.decoder, watch):
        during = reference.eager(IDS, 0)
    count = len(seen)
    after = reference.eager(IDS, 0)
    assert count == len(seen) == 2 + LAYERS * len(LAYER_OPERATIONS)
    assert torch.equal(before, during) and torch.equal(before, after)


def test_rounding_a_large_residual_is_no_error_of_what_is_added_to_it() -> None:
    residual = torch.ones(1, 64, dtype=torch.float64)
    residual[0, 7] = 22500.0
    added = torch.linspace(-0.3, 0.3, 64, dtype=torch.float64)[None]
    call = _Kept("down+residual", (added, residual), residual + added)
    exact = (residual + added).float()
    assert _of_what_is_added(call, exact) < 1e-12
    one_wrong = exact.clone()
    one_wrong[0, 3] += 0.01
    assert _of_what_is_added(call, one_wrong) > 1e-5
    one_wrong[0, 3] = float("nan")
    assert _of_what_is_added(call, one_wrong) == float("inf")
