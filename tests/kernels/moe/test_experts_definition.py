"""The definition of a mixture's matmuls, through the reference backend, against blocks of `transformers`, in fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.moe.experts import experts_add, experts_glu
from quengine.kernels.moe.router import Router, Routing, route
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm, rms_norm

ROWS, HIDDEN, INNER, EXPERTS, USED = 20, 24, 16, 6, 2
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
"""`transformers` weights experts in fp32."""


def random(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.5
    return values.double()


def stored(matrices: Tensor) -> list[QuantTensor]:
    """The matrices [E, N, K] as a file would hold them, in F32."""
    return [
        QuantTensor(f"expert {i}", FORMATS["F32"], tuple(matrix.shape), matrix.float().view(torch.uint8))
        for i, matrix in enumerate(matrices)
    ]


def moe(
    x: Tensor,
    router: Router,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """x + what the experts make of the normed x, by the reference backend. gate_up: [E, 2F, K], down: [E, N, F]."""
    backend, batch = ReferenceBackend(keep=True), _batch()
    norm = RMSNorm(NORM, 1e-5)
    gate, up = gate_up.chunk(2, dim=1)
    routing = backend.route(batch, x, norm, router)
    of_gate_up = backend.gate_up_experts(stored(gate), stored(up), biases[0])
    gated = backend.experts_glu(batch, x, norm, routing, of_gate_up, activation)
    assert gated.shape == (len(x), router.kind.used, down.shape[2])
    return backend.experts_add(batch, gated, routing, backend.down_experts(stored(down), biases[1]), x)


def _batch() -> ForwardBatch:
    rows = torch.arange(ROWS)
    return ForwardBatch("prefill", rows, rows, torch.tensor([0, ROWS]), torch.zeros(1, 1, dtype=torch.int32))


NORM = 1.0 + random(HIDDEN, seed=7)


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """Of the router, gate and up, down."""
    return (
        random(EXPERTS, HIDDEN, seed=1),
        random(EXPERTS, 2 * INNER, HIDDEN, seed=2),
        random(EXPERTS, HIDDEN, INNER, seed=3),
    )


def block_of(module: Any, config: Any, router: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    config._experts_implementation = "eager"
    block = module(config).double().eval()
    block.gate.weight.data = router
    block.experts.gate_up_proj.data, block.experts.down_proj.data = gate_up, down
    return block


def result_of(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = block(rms_norm(x, NORM, 1e-5)[None])
    return x + (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


@pytest.mark.parametrize("used", [1, 2, EXPERTS])
def test_a_block_of_mixtral(used: int) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    x, (router, gate_up, down) = random(ROWS, HIDDEN), weights()
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=used
    )
    expected = result_of(block_of(MixtralSparseMoeBlock, config, router, gate_up, down), x)
    ours = moe(x, Router(RouterKind(used, "softmax", normalized=True), router), gate_up, down)
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_routed_part_of_a_block_of_qwen(normalized: bool) -> None:
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    x, (router, gate_up, down) = random(ROWS, HIDDEN), weights()
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=normalized,
    )
    block = block_of(Qwen2MoeSparseMoeBlock, config, router, gate_up, down)
    block.shared_expert.down_proj.weight.data.zero_()
    ours = moe(x, Router(RouterKind(USED, "softmax", normalized), router), gate_up, down)
    torch.testing.assert_close(ours, result_of(block, x), **TOLERANCE)


def test_the_routed_part_of_a_block_of_glm() -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

    x, (router, gate_up, down) = random(ROWS, HIDDEN), weights()
    bias = random(EXPERTS, seed=5)
    config = Glm4MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=USED,
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    )
    block = block_of(Glm4MoeMoE, config, router, gate_up, down)
    block.gate.e_score_correction_bias.data = bias
    block.shared_experts.down_proj.weight.data.zero_()
    kind = RouterKind(USED, "sigmoid", True, 1.5, 3, 2)
    ours = moe(x, Router(kind, router, selection_bias=bias), gate_up, down)
    torch.testing.assert_close(ours, result_of(block, x), **TOLERANCE)


def test_a_block_of_gpt_oss_with_values_beyond_its_clamp() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    x, (router, gate_up, down) = random(ROWS, HIDDEN), weights()
    gate_up = gate_up * 8.0
    router_bias, gate_up_bias = random(EXPERTS, seed=5), random(EXPERTS, 2 * INNER, seed=6) * 4.0
    down_bias = random(EXPERTS, HIDDEN, seed=8)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=USED
    )
    config._experts_implementation = "eager"
    block = GptOssMLP(config).double().eval()
    block.router.weight.data, block.router.bias.data = router, router_bias
    interleaved = partial(torch.stack, dim=2)  # gate and up take turns there, and matrices are transposed
    block.experts.gate_up_proj.data = interleaved(gate_up.chunk(2, 1)).flatten(1, 2).transpose(1, 2)
    block.experts.gate_up_proj_bias.data = interleaved(gate_up_bias.chunk(2, 1)).flatten(1, 2)
    block.experts.down_proj.data, block.experts.down_proj_bias.data = down.transpose(1, 2), down_bias
    kind = RouterKind(USED, "softmax_of_chosen", normalized=False)
    ours = moe(
        x, Router(kind, router, router_bias), gate_up, down, "clamped_swish", (gate_up_bias, down_bias)
    )
    torch.testing.assert_close(ours, result_of(block, x), rtol=1e-12, atol=1e-12)


def linear(matrices: Tensor, expert: int, x: Tensor) -> Tensor:
    return x @ matrices[expert].T


def test_a_rows_result_is_the_same_whatever_rows_are_beside_it() -> None:
    x, (router, gate_up, down) = random(ROWS, HIDDEN), weights()
    of_gate_up, of_down = partial(linear, gate_up), partial(linear, down)

    def result(rows: Tensor) -> Tensor:
        routing = route(rows, Router(RouterKind(USED), router))
        return experts_add(experts_glu(rows, routing, of_gate_up, "silu"), routing, of_down, rows)

    together = result(x)
    alone = torch.cat([result(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_an_expert_that_no_row_has_is_not_computed() -> None:
    experts = torch.tensor([[1, 4], [1, 3]], dtype=torch.int32)
    computed: list[int] = []

    def counted(matrices: Tensor, expert: int, x: Tensor) -> Tensor:
        computed.append(expert)
        return linear(matrices, expert, x)

    x, (_, gate_up, down) = random(2, HIDDEN), weights()
    routing = Routing(experts, torch.ones(2, 2, dtype=torch.float64))
    gated = experts_glu(x, routing, partial(counted, gate_up), "silu")
    assert sorted(computed) == [1, 3, 4]
    computed.clear()
    experts_add(gated, routing, partial(counted, down), x)
    assert sorted(set(computed)) == [1, 3, 4]


def test_a_rows_experts_are_added_in_ascending_order_and_then_to_the_residual() -> None:
    """In fp32 the order can be seen: 1e8 + (-1e8) + 1 is 1, and 1 before them would be lost."""
    products = torch.tensor([1e8, -1e8, 1.0])
    routing = Routing(torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.ones(1, 3))
    gated = torch.ones(1, 3, 1)
    out = experts_add(gated, routing, lambda expert, x: x * products[expert], torch.tensor([[2.0]]))
    assert out.tolist() == [[3.0]]
    reordered = Routing(torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.ones(1, 3))
    out = experts_add(gated, reordered, lambda expert, x: x * products[expert], torch.tensor([[2.0]]))
    assert out.tolist() == [[2.0]]
