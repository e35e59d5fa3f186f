"""The operations of blocks other than Llama's (norms behind the matmuls, none in front, GELU, scaled embeddings) on the
CUDA backend against the reference: one row, batches and prompts."""

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm import workspace as workspace_module
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.glu import Activation
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

HIDDEN, FFN, EPS = 96, 64, 1e-6
BUDGET = {"q-dot": 1e-8, "fp16": 5e-6}
REFERENCE = ReferenceBackend(keep=True)


def make_batch(phase: str, rows: int, device: torch.device | str) -> ForwardBatch:
    ids = [(7 * row) % HIDDEN for row in range(rows)]
    if phase == "prefill":
        return prefill_batch([ids], [0], [[[0]]], torch.device(device), all_logits=True)
    return decode_batch(ids, [0] * rows, [[[row]] for row in range(rows)], torch.device(device))


@pytest.fixture(params=["plain", "batch-invariant", "dequantized"])
def backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> CudaBackend:
    """`dequantized`: batches take the way of many rows, through cuBLAS."""
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    if request.param == "dequantized":
        monkeypatch.setattr(workspace_module, "is_hopper", lambda *_: False)
        monkeypatch.setattr(workspace_module, "fused_limit", lambda _: 0)
    return CudaBackend(device, request.param == "batch-invariant")


def norm(width: int, seed: int) -> RMSNorm:
    return RMSNorm(torch.rand(width, generator=torch.Generator().manual_seed(seed)) + 0.5, EPS)


def on(backend: CudaBackend, given: RMSNorm) -> RMSNorm:
    return RMSNorm(given.weight.to(backend.device), given.eps)


def exact(given: RMSNorm | None) -> RMSNorm | None:
    return None if given is None else RMSNorm(given.weight.double(), given.eps)


def budget(backend: CudaBackend, rows: int) -> float:
    return BUDGET["q-dot" if rows == 1 and not backend.batch_invariant else "fp16"]


def plain(x: object) -> torch.Tensor:
    """What a backend's rows stand for."""
    if isinstance(x, torch.Tensor):
        return x
    dequantize = getattr(x, "dequantize")  # noqa: B009 (rounded, scaled fp16, or a product)
    rows: torch.Tensor = dequantize()
    return rows


SHAPES = pytest.mark.parametrize(("phase", "rows"), [("decode", 1), ("decode", 3), ("prefill", 9)])


@SHAPES
def test_scaled_embedding(phase: str, rows: int, backend: CudaBackend) -> None:
    weight, scale = ordinary_weight("Q6_K", HIDDEN, 256), 16.0**0.75
    ours = backend.embed(make_batch(phase, rows, backend.device), backend.weight([weight]), scale)
    wanted = REFERENCE.embed(make_batch(phase, rows, "cpu"), REFERENCE.weight([weight]), scale)
    assert nmse(ours, wanted) < 1e-12


@SHAPES
def test_a_linear_layer_without_a_norm(phase: str, rows: int, backend: CudaBackend) -> None:
    weight, x = ordinary_weight("Q8_0", FFN, HIDDEN), ordinary_activations(rows, HIDDEN)
    batch = make_batch(phase, rows, backend.device)
    ours = backend.norm_linear(batch, x.to(backend.device), None, backend.weight([weight]))
    wanted = REFERENCE.norm_linear(batch, x.double(), None, REFERENCE.weight([weight]))
    assert nmse(plain(ours), wanted) < budget(backend, rows)


@SHAPES
@pytest.mark.parametrize(
    ("normed", "activation", "formats"),
    [
        (False, "silu", ("Q8_0", "Q8_0")),
        (False, "gelu_tanh", ("Q8_0", "Q4_0")),
        (True, "silu", ("Q8_0", "Q4_0")),
        (True, "gelu_tanh", ("Q8_0", "Q8_0")),
    ],
)
def test_gated_feed_forward(
    phase: str,
    rows: int,
    normed: bool,
    activation: Activation,
    formats: tuple[str, str],
    backend: CudaBackend,
) -> None:
    gate, up = (ordinary_weight(name, FFN, HIDDEN, seed) for seed, name in enumerate(formats))
    x, given = ordinary_activations(rows, HIDDEN) * 0.1, norm(HIDDEN, 5) if normed else None
    batch = make_batch(phase, rows, backend.device)
    ours = backend.norm_glu(
        batch,
        x.to(backend.device),
        None if given is None else on(backend, given),
        backend.gate_up_weight(gate, up),
        activation,
    )
    wanted = REFERENCE.norm_glu(
        batch, x.double(), exact(given), REFERENCE.gate_up_weight(gate, up), activation
    )
    assert nmse(plain(ours)[:, :FFN], wanted) < budget(backend, rows)


def after_post_norm(
    backend: CudaBackend,
    weight: QuantTensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    phase: str,
    next_: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The residual stream after a post norm, and the next norm's rows where it was asked to give them."""
    batch = make_batch(phase, len(x), backend.device)
    result = backend.linear_add(
        batch,
        x.to(backend.device),
        backend.weight([weight]),
        residual.clone().to(backend.device),
        on(backend, norm(HIDDEN, 2)) if next_ else None,
        on(backend, norm(HIDDEN, 1)),
    )
    if isinstance(result, RmsNormed):
        return result.hidden, plain(result.rms_normed)[:, :HIDDEN]
    return result, None


@SHAPES
@pytest.mark.parametrize("next_", [False, True], ids=["alone", "with the next norm"])
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_post_norm(phase: str, rows: int, next_: bool, name: str, backend: CudaBackend) -> None:
    weight, x = ordinary_weight(name, HIDDEN, 64), ordinary_activations(rows, 64)
    residual = ordinary_activations(rows, HIDDEN, 3)
    hidden, normed = after_post_norm(backend, weight, x, residual, phase, next_)
    wanted = REFERENCE.linear_add(
        make_batch(phase, rows, "cpu"),
        x.double(),
        REFERENCE.weight([weight]),
        residual.double(),
        None,
        exact(norm(HIDDEN, 1)),
    )
    assert nmse(hidden, wanted) < budget(backend, rows)
    assert (normed is not None) == next_
    if normed is not None:
        after = exact(norm(HIDDEN, 2))
        assert after is not None
        assert nmse(normed, REFERENCE.normed(wanted, after)) < budget(backend, rows)


def added(
    backend: CudaBackend | ReferenceBackend, rows: slice, phase: str, next_: bool, terms: str, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of 9 rows through `linear_add` with what `terms` names: the residual stream, and the norm that reads it."""
    wide = backend.dtype
    x, residual = ordinary_activations(9, 64)[rows], ordinary_activations(9, HIDDEN, 3)[rows]
    given = {
        "bias": ordinary_activations(1, HIDDEN, 4)[0],
        "row_scale": torch.rand(9, generator=torch.Generator().manual_seed(6))[rows],
        "post_norm": norm(HIDDEN, 1),
    }
    terms_on = {
        term: RMSNorm(value.weight.to(backend.device, wide), EPS)
        if isinstance(value, RMSNorm)
        else value.to(backend.device, wide)
        for term, value in given.items()
        if term in terms.split("+")
    }
    after = RMSNorm(norm(HIDDEN, 2).weight.to(backend.device, wide), EPS)
    result = backend.linear_add(
        make_batch(phase, len(x), backend.device),
        x.to(backend.device, wide),
        backend.weight([ordinary_weight(name, HIDDEN, 64)]),
        residual.clone().to(backend.device, wide),
        after if next_ else None,
        **terms_on,
    )
    if isinstance(result, RmsNormed):
        return result.hidden, plain(result.rms_normed)[:, :HIDDEN]
    return result, backend.normed(result, after)


@SHAPES
@pytest.mark.parametrize(
    ("terms", "name", "next_"),
    [
        ("bias", "Q8_0", False),
        ("bias", "F16", True),
        ("row_scale", "Q8_0", True),
        ("row_scale", "F16", False),
        ("bias+row_scale", "Q8_0", True),
        ("bias+row_scale", "F16", False),
        ("bias+post_norm+row_scale", "Q8_0", False),
        ("bias+post_norm+row_scale", "F16", True),
    ],
)
def test_bias_and_row_scales_of_the_product(
    terms: str, phase: str, rows: int, next_: bool, name: str, backend: CudaBackend
) -> None:
    ours = added(backend, slice(rows), phase, next_, terms, name)
    wanted = added(REFERENCE, slice(rows), phase, next_, terms, name)
    for mine, exact_rows in zip(ours, wanted, strict=True):
        assert nmse(mine, exact_rows) < budget(backend, rows)


@pytest.mark.parametrize("backend", ["batch-invariant"], indirect=True)
@pytest.mark.parametrize("terms", ["bias", "row_scale"])
def test_a_row_with_a_bias_or_a_scale_does_not_depend_on_the_others(terms: str, backend: CudaBackend) -> None:
    all_rows = added(backend, slice(9), "prefill", True, terms, "Q8_0")
    for phase in ("prefill", "decode"):
        for one, among in zip(added(backend, slice(4, 5), phase, True, terms, "Q8_0"), all_rows, strict=True):
            assert torch.equal(one[0], among[4])


@SHAPES
@pytest.mark.parametrize("names", [("Q8_0", "Q8_0"), ("Q8_0", "Q4_0"), ("F16", "F16")], ids="+".join)
def test_bias_of_a_projection_behind_a_norm(
    names: tuple[str, str], phase: str, rows: int, backend: CudaBackend
) -> None:
    """Of one type and of two, as those of queries, keys and values may be."""
    weights = [ordinary_weight(name, FFN, HIDDEN, seed) for seed, name in enumerate(names)]
    x, given, bias = (
        ordinary_activations(rows, HIDDEN),
        norm(HIDDEN, 5),
        ordinary_activations(1, 2 * FFN, 4)[0],
    )
    batch = make_batch(phase, rows, backend.device)
    ours = backend.norm_linear(
        batch, x.to(backend.device), on(backend, given), backend.weight(weights), bias.to(backend.device)
    )
    weight = REFERENCE.weight(weights)
    wanted = REFERENCE.norm_linear(batch, x.double(), exact(given), weight, bias.double())
    assert nmse(plain(ours), wanted) < budget(backend, rows)
    if backend.batch_invariant:  # what is not rounded between product and bias has the bits of what is
        without = backend.norm_linear(
            batch, x.to(backend.device), on(backend, given), backend.weight(weights)
        )
        assert torch.equal(plain(ours), plain(without) + bias.to(backend.device))


@pytest.mark.parametrize("backend", ["batch-invariant"], indirect=True)
def test_a_row_after_a_post_norm_does_not_depend_on_the_others(backend: CudaBackend) -> None:
    weight, x = ordinary_weight("Q8_0", HIDDEN, 64), ordinary_activations(9, 64)
    residual = ordinary_activations(9, HIDDEN, 3)
    all_rows = after_post_norm(backend, weight, x, residual, "prefill", True)
    alone = after_post_norm(backend, weight, x[4:5], residual[4:5], "decode", True)
    for one, among in zip(alone, all_rows, strict=True):
        assert one is not None and among is not None and torch.equal(one[0], among[4])
