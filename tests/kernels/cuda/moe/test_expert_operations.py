"""The operations of a mixture of experts on the CUDA backend against the reference: one row, batches and prompts."""

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.attention.attention_prefill import is_hopper
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Router
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm
from tests.kernels.cuda.moe.expert_runs import experts_of
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight

HIDDEN, FFN, COUNT, EPS = 64, 32, 4, 1e-6
Q_DOT, FP16 = 1e-8, 2e-5
REFERENCE = ReferenceBackend(keep=True)
KIND = RouterKind(2)


@pytest.fixture
def backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    return CudaBackend(device)


def make_batch(phase: str, rows: int, device: torch.device | str) -> ForwardBatch:
    ids = list(range(rows))
    if phase == "prefill":
        return prefill_batch([ids], [0], [[[0]]], torch.device(device), all_logits=True)
    return decode_batch(ids, [0] * rows, [[[row]] for row in ids], torch.device(device))


def two_layers(
    backend: CudaBackend | ReferenceBackend,
    phase: str,
    x: torch.Tensor,
    formats: tuple[str, str, str],
    activation: Activation,
    bias: bool,
    shared: bool,
    chosen: list[torch.Tensor] | None,
    experts_alone: bool = True,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A dense projection that begins the norm, then the same experts twice: the stream, and each choice.
    experts_alone: the norm says so where there is no shared expert."""
    batch, like = (
        make_batch(phase, len(x), backend.device),
        {"dtype": backend.dtype, "device": backend.device},
    )
    random = torch.Generator().manual_seed(5)
    of_experts = KIND.used if experts_alone and not shared else 0
    norm = RMSNorm((torch.rand(HIDDEN, generator=random) + 0.5).to(**like), EPS, of_experts)
    gate, up, down = (
        experts_of(name, COUNT, *shape, seed)
        for seed, (name, shape) in enumerate(zip(formats, [(FFN, HIDDEN)] * 2 + [(HIDDEN, FFN)], strict=True))
    )
    biases = [torch.randn(COUNT, n, generator=random).to(**like) if bias else None for n in (2 * FFN, HIDDEN)]
    gate_up, down_experts = (
        backend.gate_up_experts(gate, up, biases[0]),
        backend.down_experts(down, biases[1]),
    )
    router = Router(KIND, torch.randn(COUNT, HIDDEN, generator=random).to(**like))
    output = backend.weight([ordinary_weight("Q8_0", HIDDEN, HIDDEN)])
    dense = [ordinary_weight("Q8_0", *shape, 3) for shape in ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))]
    dense_gate_up, dense_down = backend.gate_up_weight(dense[0], dense[1]), backend.weight([dense[2]])
    stream = backend.linear_add(batch, 0.1 * x.to(**like), output, x.to(**like), norm)
    choices = []
    for layer in range(2):
        forced = None if chosen is None else chosen[layer].to(backend.device)
        routing = backend.route(batch, stream, norm, router, forced)
        choices.append(routing.experts.cpu())
        gated = backend.experts_glu(batch, stream, norm, routing, gate_up, activation)
        if shared:
            hidden = backend.norm_glu(batch, stream, norm, dense_gate_up, activation)
            stream = backend.linear_add(batch, hidden, dense_down, stream)
        stream = backend.experts_add(batch, gated, routing, down_experts, stream, norm)
    return (stream.hidden if isinstance(stream, RmsNormed) else stream), choices


CASES: dict[str, tuple[tuple[str, str, str], Activation, bool, bool]] = {
    "paired": (("Q8_0", "Q8_0", "Q8_0"), "silu", False, False),
    "biases, clamped": (("MXFP4", "MXFP4", "MXFP4"), "clamped_swish", True, False),
    "unpaired, shared expert": (("Q4_0", "Q5_1", "Q4_1"), "silu", False, True),
    "floats, shared expert": (("F16", "F16", "BF16"), "gelu_tanh", True, True),
}


@pytest.mark.parametrize(
    ("phase", "rows", "batch_invariant", "case"),
    [
        *(("decode", 1, False, case) for case in CASES),
        ("decode", 1, True, "paired"),
        ("decode", 3, False, "unpaired, shared expert"),
        ("decode", 3, True, "biases, clamped"),
        ("prefill", 9, False, "floats, shared expert"),
    ],
)
def test_experts_are_the_reference(
    phase: str, rows: int, batch_invariant: bool, case: str, backend: CudaBackend
) -> None:
    """On the choice of the device; in the first layer, whose rows hardly differ yet, the reference's is the same."""
    backend.batch_invariant = batch_invariant
    x = ordinary_activations(rows, HIDDEN) * 0.1
    ours, choices = two_layers(backend, phase, x, *CASES[case], None)
    wanted, _ = two_layers(REFERENCE, phase, x.double(), *CASES[case], choices)
    _, free = two_layers(REFERENCE, phase, x.double(), *CASES[case], None)
    assert torch.equal(choices[0], free[0])
    assert nmse(ours, wanted) < (Q_DOT if rows == 1 and not batch_invariant else FP16)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_norm_that_experts_alone_read_has_the_same_bits(
    batch_invariant: bool, backend: CudaBackend
) -> None:
    """On Hopper the launch that groups a batch's rows norms them."""
    if not is_hopper(backend.device):
        pytest.skip("needs a Hopper GPU")
    backend.batch_invariant = batch_invariant
    for rows in (1, 3, 20):
        x = ordinary_activations(rows, HIDDEN) * 0.1
        alone, other = (
            two_layers(backend, "decode", x, *CASES["paired"], None, flag)[0] for flag in (True, False)
        )
        assert torch.equal(alone, other)


def test_what_one_row_has_gated_outlives_the_shared_expert(backend: CudaBackend) -> None:
    """Also where the shared expert is wider."""
    batch, device = make_batch("decode", 1, backend.device), backend.device
    norm = RMSNorm(torch.ones(HIDDEN, device=device), EPS)
    gate_up = backend.gate_up_experts(
        experts_of("Q8_0", 4, FFN, HIDDEN), experts_of("Q8_0", 4, FFN, HIDDEN, 1)
    )
    shared = backend.gate_up_weight(*(ordinary_weight("Q8_0", 8 * FFN, HIDDEN, seed) for seed in (2, 3)))
    backend.weight([ordinary_weight("Q8_0", HIDDEN, 8 * FFN)])
    x = ordinary_activations(1, HIDDEN).to(device)
    routing = backend.route(batch, x, norm, Router(KIND, torch.randn(COUNT, HIDDEN, device=device)))
    gated = backend.experts_glu(batch, x, norm, routing, gate_up)
    kept = gated.dequantize().clone()
    backend.norm_glu(batch, x, norm, shared)
    backend.experts_glu(batch, 2 * x, norm, routing, gate_up)
    assert torch.equal(gated.dequantize(), kept)
