"""The operations that a decoder needs of a device: one protocol, one implementation per kind of device.

A backend stores weights in its own form and selects the kernels. The operations are as coarse as the launches of a
fast device (a norm with the matmul after it, the whole attention, SwiGLU with its norm and matmul), so the decoder's
text is the same for every backend. Each operation takes the step, a `ForwardBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from quengine.kernels.altup_operations import AltUpOperations
from quengine.kernels.encoder_attention import EncoderAttentionSpec
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.glu import Activation, Gating
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_FORMATS, CacheFormat, CacheType
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.experts import ExpertShare
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.pointwise import Pointwise
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import Communicator
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import RopeLayout
from quengine.kernels.short_conv import ShortConvSpec

Hidden: TypeAlias = Any
"""The activations between two operations of a backend, conceptually [T, width]: a plain tensor on the
reference and CPU backends; a device backend may add quantized planes or partial sums. The decoder only passes
it on.
"""


_CODED: dict[torch.dtype, CacheType] = {torch.int8: "q8_0", torch.uint8: "q4_0"}
"""The cache types that store codes, by dtype. Any float dtype is "f16"; the definitions also keep fp32 and fp64."""


@dataclass(frozen=True)
class KVLayer:
    """One layer's KV cache, written in place.

    `k`, `v`: [rows, kv_heads, head_dim] with BLOCK_SIZE rows per block, fp16 or codes (kernels/kv/kv_codes.py). The
    codes of q8_0 are int8, those of q4_0 uint8 [rows, kv_heads, head_dim / 2]; both have scales `k_scale`, `v_scale`,
    fp16 [rows, kv_heads, head_dim / 32]. Strides are arbitrary; in memory each head's positions are adjacent. In latent
    attention `v` and `v_scale` are `k` and `k_scale` themselves, as values are the first elements of keys
    (kernels/latent_attention.py).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def cache_type(self) -> CacheType:
        return _CODED.get(self.k.dtype, "f16")

    @property
    def format(self) -> CacheFormat:
        return CACHE_FORMATS[self.cache_type]

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.k.shape[2] * (2 if self.format.bits == 4 else 1)

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.v.shape[2] * (2 if self.format.bits == 4 else 1)

    @property
    def tensors(self) -> list[Tensor]:
        """All stored tensors, each once, with the positions first."""
        held = (self.k, self.k_scale) if self.v is self.k else (self.k, self.v, self.k_scale, self.v_scale)
        return [tensor for tensor in held if tensor is not None]

    @property
    def blocks(self) -> list[Tensor]:
        """The same tensors by block, as views: [blocks, BLOCK_SIZE, kv_heads, width]."""
        return [t.view(len(t) // BLOCK_SIZE, BLOCK_SIZE, *t.shape[1:]) for t in self.tensors]


@dataclass(frozen=True)
class SlotLayer:
    """One layer's state of each sequence, written in place. Each of `parts` is fp32 [slots, ...]; slot 0 is padding.

    A sequence's slot is the first entry of its block table in the layer's cache group (ForwardBatch.slots_of).
    """

    parts: tuple[Tensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.parts)

    @property
    def blocks(self) -> list[Tensor]:
        """The parts: a slot is a block of its pool."""
        return list(self.parts)


LayerState: TypeAlias = KVLayer | SlotLayer
"""A layer's state of the sequences, kept between steps."""


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of one layer's attention.

    `cos`, `sin` are [ctx, rope_dim / 2] fp32, one row a position. `rope_layout` says which elements rotate
    together: "pairs" (0,1), (2,3), ... or "halves" (0, d/2), (1, d/2 + 1), ... `mask_band` is the causal mask
    made once at load (see kernels/attention.py). `query_scale` [ctx] fp32 multiplies the rotated query of each
    position. `q_norm`, `k_norm` are weights of norms before the rotation: [head_dim] for a norm of each head by itself,
    or [heads * head_dim] and [kv_heads * head_dim] for a norm of all heads of a row together. With `norms_rotated` the
    norms are of each head, after the rotation.
    `cache_group` is the group of layers whose block tables this layer uses (ForwardBatch.block_tables_of).
    `sinks` [heads] fp32 are logits, one per query head, in the softmax's denominator (see kernels/attention.py).
    `gated`: each query head's columns are followed by head_dim gates (`gate_output` of kernels/attention.py).
    `v_norm`: each value head is divided by its root mean square before it is cached.
    `softcap`: scores s become `softcap * tanh(s / softcap)`; 0: they stay as they are.
    `shared`: keys and values are those that an earlier layer of the step has written; the rows are queries alone, and
    there is no k_norm.
    `images_both_ways`: this layer lets image rows attend both ways, where the batch says so.
    `chunk`: positions per chunk, 0 without chunks. A position sees none before its own chunk, and `window` is None. The
    layer is given `ForwardBatch.chunked`, if the batch has it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rope_layout: RopeLayout
    cos: Tensor
    sin: Tensor
    mask_band: Tensor
    query_scale: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norms_rotated: bool = False
    eps: float = 0.0
    cache_group: int = 0
    sinks: Tensor | None = None
    gated: bool = False
    v_norm: bool = False
    softcap: float = 0.0
    shared: bool = False
    images_both_ways: bool = True
    chunk: int = 0


@dataclass(frozen=True)
class Branch:
    """A second branch of a feed-forward: `rows` [T, N], its `norm`, and the norm of the first branch.

    Source: `Gemma4TextDecoderLayer` in the `transformers` library.
    """

    rows: Hidden
    norm: RMSNorm
    first_norm: RMSNorm


class Weight(Protocol):
    """A matrix in the backend's form: `rows` outputs by `cols` inputs; one pass over it reads `nbytes` bytes."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


WeightT = TypeVar("WeightT", bound=Weight)


class Backend(Protocol[WeightT]):
    """The operations of a decoder over the T tokens of a step, on weights in the backend's own form.

    Only `attention`, `short_conv`, `gated_delta` and `mamba2` depend on which tokens form a sequence; `batch.phase`
    selects the kernels of the others.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    communicator: Communicator

    def weight(self, parts: Sequence[QuantTensor]) -> WeightT:
        """Loads matrices [N_i, K] that are applied to the same input; outputs are concatenated, in order."""
        ...

    def first_rows(self, weight: WeightT, rows: int) -> WeightT:
        """The first `rows` rows, a multiple of 16, of a one-part weight, in the same memory."""
        ...

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> WeightT:
        """Loads the gate and up matrices [F, K] of a gated feed-forward, for `norm_glu`."""
        ...

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        """Loads one-dimensional tensors (norm weights, biases), concatenated, as [n] on the device."""
        ...

    def embed(self, batch: ForwardBatch, weight: WeightT, scale: float = 1.0) -> Hidden:
        """Rows `batch.token_ids` of a one-part weight times `scale`, or as `batch.embeds` gives them: [T, K]."""
        ...

    def row_table(self, table: QuantTensor) -> WeightT:
        """Loads a matrix that stays in host memory: a step reads one row of it per token (`layer_inputs`)."""
        ...

    def layer_inputs(
        self, batch: ForwardBatch, projected: Hidden, norm: RMSNorm, table: WeightT, scale: float
    ) -> Hidden:
        """The per-layer embeddings of the step's tokens: [T, layers * n], for norm weights [n].

        They are `norm` of each n columns of `projected`, plus rows `batch.token_ids` of `table` [vocab, layers * n]
        times `scale`. `projected` is a result of `norm_linear` and is overwritten. The embeddings stay valid until the
        step's end.
        """
        ...

    def input_glu(
        self, batch: ForwardBatch, x: Hidden, gate: WeightT, inputs: Hidden, layer: int, activation: Gating
    ) -> Hidden:
        """activation(gate @ x) times the columns of layer number `layer` of `inputs`: [T, n] for a gate [n, K].

        x is not changed: `linear_add` adds to it. activation: "gelu_tanh" or "silu".
        """
        ...

    def norm_linear(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        weight: WeightT,
        bias: Tensor | None = None,
    ) -> Hidden:
        """`norm` of x [T, K], or x itself, then the matmul with weight [N, K], plus bias [N]: [T, N]."""
        ...

    def linear(self, batch: ForwardBatch, x: Tensor, weight: WeightT) -> Tensor:
        """The matmul of weight [N, K] with rows x [T, K] as plain rows: [T, N] in the backend's dtype."""
        ...

    def norm_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        gate_up: WeightT,
        activation: Gating = "silu",
    ) -> Hidden:
        """`norm` of x [T, K], or x itself, times gate_up [2F, K], gate first; then activation(gate) * up: [T, F]."""
        ...

    def norm_pointwise(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: Norm | None,
        up: WeightT,
        activation: Pointwise,
        bias: Tensor | None = None,
    ) -> Hidden:
        """`norm` of x [T, K], or x itself, times up [F, K], plus bias [F]; then the activation, gateless: [T, F]."""
        ...

    def linear_add(
        self,
        batch: ForwardBatch,
        x: Hidden,
        weight: WeightT,
        residual: Hidden,
        next_norm: Norm | None = None,
        post_norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        row_scale: Hidden | None = None,
        branch: Branch | None = None,
        *,
        partial: bool = False,
    ) -> Hidden:
        """`post_norm(row_scale * (x @ weight.T + bias)) + residual`: x [T, K], weight [N, K], residual [T, N].

        post_norm, bias [N] and row_scale, fp32 [T] or [T, 1], are optional. The residual is multiplied by the
        post_norm's `residual_scale`. `branch`, only with a post_norm: the post_norm reads
        `branch.first_norm(...) + branch.norm(branch.rows)` instead. `partial`: x and weight have this rank's
        columns, and `x @ weight.T` is summed over the ranks. `next_norm`: the norm that reads the result, for a
        backend that computes a part of it here; the next operation takes the same norm anyway. The result may
        overwrite the residual.
        """
        ...

    def gate_up_experts(
        self,
        gate: Sequence[QuantTensor] | None,
        up: Sequence[QuantTensor],
        bias: Tensor | None = None,
        share: ExpertShare | None = None,
    ) -> WeightT:
        """Loads the gate and up matrices [F, K] of E experts, for `experts_glu`. bias: [E, 2F], gate first. gate None:
        the experts have neither gate nor bias. share: which of the layer's experts they are; None: all of them.

        All gate matrices have the same format, and so do all up matrices.
        """
        ...

    def down_experts(
        self, down: Sequence[QuantTensor], bias: Tensor | None = None, share: ExpertShare | None = None
    ) -> WeightT:
        """Loads the matrices [N, F] of E experts, of one format, for `experts_add`. bias: [E, N]. share: see
        `gate_up_experts`. Also loads the matrices of each head for `latent_attention`.
        """
        ...

    def route(
        self, batch: ForwardBatch, x: Hidden, norm: RMSNorm, router: Router, experts: Tensor | None = None
    ) -> Routing:
        """The experts of each row and their weights, from `norm` of x [T, K], in fp32: see kernels/moe/router.py.

        `experts`, int32 [T, k], ascending: use these experts, and compute only their weights.
        """
        ...

    def weighed(self, batch: ForwardBatch, x: Hidden, norm: RMSNorm, weights: Tensor) -> Hidden:
        """`norm` of x [T, K], each row times its routing weight in `weights` [T, 1]: [T, K]. x is not changed."""
        ...

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: WeightT,
        activation: Activation = "silu",
    ) -> Hidden:
        """activation(gate) * up of each row's k experts, which read `norm` of x [T, K], or x itself: [T, k, F]. If the
        activation has no gate (glu.GATELESS), activation(up).

        Experts that `gate_up` lacks, because another rank has them, are skipped. x is not changed: the shared expert
        reads it next.
        """
        ...

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: Hidden,
        routing: Routing,
        down: WeightT,
        residual: Hidden | None,
        next_norm: Norm | None = None,
        *,
        partial: bool = False,
    ) -> Hidden:
        """Residual [T, N] plus the weighted sum of each row's experts: `down` of gated [T, k, F], in ascending order.
        Experts that `down` does not have add nothing.

        Without a residual the result is the sum alone, in memory that no other operation of the layer writes.
        `next_norm` and the result's memory: see `linear_add`. `partial`: the experts' sum, biases included, is summed
        over the ranks.
        """
        ...

    @property
    def altup(self) -> AltUpOperations:
        """The operations of layers with alternating updates."""
        ...

    def attention(self, batch: ForwardBatch, qkv: Hidden, spec: AttentionSpec, layer: KVLayer) -> Hidden:
        """Rotary embedding, cache write and causal attention of the step's tokens.

        `qkv` is [T, (heads + 2 * kv_heads) * head_dim], queries first, and has heads * head_dim columns more if the
        spec is `gated`. The keys and values are written to `layer` before they are read; if the spec is `shared`, qkv
        has only queries, and `layer` is the cache of the layer that wrote them. Returns [T, heads * head_dim].
        """
        ...

    def columns(self, x: Hidden, first: int, last: int) -> Hidden:
        """Columns first .. last - 1 of a result of `norm_linear`: [T, last - first]."""
        ...

    def latent_attention(
        self, batch: ForwardBatch, q: Hidden, latent: Hidden, spec: LatentSpec, layer: KVLayer
    ) -> Hidden:
        """Latent attention of the step's tokens: [T, heads * values]. q [T, heads * (plain + rotated)] and latent [T,
        rank + rotated] are results of `norm_linear` and may be overwritten. See kernels/latent_attention.py.
        """
        ...

    def check_latent(self, spec: LatentSpec) -> None:
        """Called at load: raises EngineError if `latent_attention` does not compute these sizes."""
        ...

    def encoder_attention(self, batch: ForwardBatch, qkv: Hidden, spec: EncoderAttentionSpec) -> Hidden:
        """Attention among all rows of each text, qkv [T, 3 * heads * head_dim]: [T, heads * head_dim]. Eager, in
        prefill. See kernels/encoder_attention.py.
        """
        ...

    def short_conv(self, batch: ForwardBatch, x: Hidden, spec: ShortConvSpec, state: SlotLayer) -> Hidden:
        """The gated short convolution of the step's tokens, x [T, 3 * channels], which also updates `state`: [T,
        channels].

        See kernels/short_conv.py.
        """
        ...

    def gated_delta(self, batch: ForwardBatch, x: Hidden, spec: GatedDeltaSpec, state: SlotLayer) -> Hidden:
        """The gated delta net of the step's tokens, x [T, sum of spec.widths]: [T, value_heads * head_dim]. x may be
        overwritten. The parts of `state` are history and memory. See kernels/gated_delta.py.
        """
        ...

    def check_gated_delta(self, spec: GatedDeltaSpec) -> None:
        """Called at load: raises EngineError if `gated_delta` does not compute heads of this size."""
        ...

    def kept(self, x: Hidden) -> Hidden:
        """x, a result of `norm_glu`, in memory that stays valid while another part of the layer is computed."""
        ...

    def mamba2(self, batch: ForwardBatch, x: Hidden, spec: Mamba2Spec, state: SlotLayer) -> Hidden:
        """The Mamba2 layer of the step's tokens, x [T, sum of spec.widths]: [T, heads * head_dim]. x may be
        overwritten. The parts of `state` are history and memory. See kernels/mamba2.py.
        """
        ...

    def check_mamba2(self, spec: Mamba2Spec) -> None:
        """Called at load: raises EngineError if `mamba2` does not compute heads of this size."""
        ...

    def gather_rows(self, x: Hidden, rows: Tensor) -> Hidden:
        """Rows `rows` (int64 [n], on the device) of x [T, K]: [n, K].

        After the last layer's attention only rows with logits continue.
        """
        ...

    def add_to_rows(self, x: Hidden, rows: Tensor, values: Tensor) -> Hidden:
        """x [T, K] with values [n, K] added to rows `rows`, int64 [n], without repeats. x is the residual stream, which
        no norm has read yet, and may be overwritten."""
        ...

    def flat_hidden(self, x: Hidden) -> Tensor:
        """x [T, K] as one vector of the backend's dtype, which another device turns back with `hidden_of`. A single row
        comes with what the backend has prepared for the next layer.
        """
        ...

    def hidden_of(self, flat: Tensor, rows: int, norm: Norm | None) -> Hidden:
        """The rows that another device gave to `flat_hidden`. norm: the norm that reads them."""
        ...

    def normed(self, x: Hidden, norm: Norm) -> Tensor:
        """`norm` of x [T, K] as plain rows, which embeddings pool: [T, K] in the backend's dtype."""
        ...

    def keep_hidden(
        self, batch: ForwardBatch, x: Hidden, norm: Norm | None, kept: Tensor, newest: bool = False
    ) -> None:
        """Writes `norm` of x [T, K], or x itself, to `kept` [rows, K], at the rows of the step's positions. With
        `newest`, a decode step writes only the last of each sequence's rows.

        x is not changed. See kernels/hidden_rows.py.
        """
        ...

    def join_hidden(
        self, batch: ForwardBatch, x: Hidden, norm: Norm, kept: Tensor, kept_norm: Norm, weight: WeightT
    ) -> Hidden:
        """The matmul of weight [N, 2K] with `norm` of x [T, K] side by side with `hidden_before(batch, kept,
        kept_norm)`: [T, N]. See kernels/hidden_rows.py.
        """
        ...

    def hidden_before(self, batch: ForwardBatch, kept: Tensor, norm: Norm | None) -> Hidden:
        """For each token the row of `kept` of the position before its own, or `norm` of that row: [T, K]."""
        ...

    def fused(self, batch: ForwardBatch, x: Hidden, weight: WeightT, before: Hidden | None) -> Hidden:
        """The matmul of weight [N, K] with the residual stream x [T, K], added to `before` [T, N], an earlier result of
        this operation in the same step: [T, N]. x is not changed.
        """
        ...

    def spread_logits(self, batch: ForwardBatch, logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
        """Logits [n, V] of the tokens with ids `tokens`, int64 [V], as [n, vocab]. See kernels/hidden_rows.py."""
        ...

    def logits(
        self, batch: ForwardBatch, x: Hidden, norm: Norm, weight: WeightT, softcap: float = 0.0
    ) -> Tensor:
        """Final norm and output matmul of x [n, K]: [n, V]; with a `softcap` c, each logit y is `c tanh(y / c)`."""
        ...
