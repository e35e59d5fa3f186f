"""Builds small GGUF files in memory for the tests, whole ones and, with the raw hooks, broken ones.

    data = GGUFBuilder().kv("general.architecture", "llama").tensor("output_norm.weight", (64,)).build()

It writes bytes by its own rules, so that it is an independent opinion on the format: it shares no code with
the reader. Shapes are in torch order; tensor data defaults to zeros.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

SCALAR_CODES = {
    "uint8": (0, "B"),
    "int8": (1, "b"),
    "uint16": (2, "H"),
    "int16": (3, "h"),
    "uint32": (4, "I"),
    "int32": (5, "i"),
    "float32": (6, "f"),
    "bool": (7, "?"),
    "string": (8, ""),
    "array": (9, ""),
    "uint64": (10, "Q"),
    "int64": (11, "q"),
    "float64": (12, "d"),
}

# name -> (number in the file, weights per block, bytes per block)
TENSOR_CODES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
    "I32": (26, 1, 4),
}


def string(text: str | bytes) -> bytes:
    """A GGUF string: u64 length, then the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def guess_type(value: Any) -> str:
    """The value type converters write: bool, uint32 (int32 when negative), float32, string."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int32" if value < 0 else "uint32"
    if isinstance(value, float):
        return "float32"
    return "string"


def scalar(value: Any, kind: str) -> bytes:
    return string(value) if kind == "string" else struct.pack("<" + SCALAR_CODES[kind][1], value)


def array(values: Sequence[Any], kind: str) -> bytes:
    """An array's element type, length and elements."""
    head = struct.pack("<IQ", SCALAR_CODES[kind][0], len(values))
    if kind == "string":
        return head + b"".join(string(v) for v in values)
    return head + struct.pack(f"<{len(values)}{SCALAR_CODES[kind][1]}", *values)


def entry(key: str | bytes, value: Any, kind: str | None = None) -> bytes:
    """One metadata entry. `kind` is the value's type, of a list the elements' type."""
    if isinstance(value, list | tuple | np.ndarray):
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(value, np.ndarray) and value.dtype.name in SCALAR_CODES:
            kind = kind or value.dtype.name
        kind = kind or guess_type(values[0] if len(values) else "")
        return string(key) + struct.pack("<I", 9) + array(values, kind)
    kind = kind or guess_type(value)
    return string(key) + struct.pack("<I", SCALAR_CODES[kind][0]) + scalar(value, kind)


def tensor_nbytes(shape: Sequence[int], kind: str) -> int:
    """Bytes of a tensor of torch-order `shape`."""
    _, block, nbytes = TENSOR_CODES[kind]
    return shape[-1] // block * nbytes * prod(shape[:-1])


@dataclass
class _Tensor:
    name: str | bytes
    shape: tuple[int, ...]
    kind: str | int
    data: bytes
    offset: int | None


@dataclass
class GGUFBuilder:
    """Collects entries and tensors and lays them out. `*_field` replaces what the header would say."""

    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    tensor_count_field: int | None = None
    entry_count_field: int | None = None
    entries: list[bytes] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)

    def kv(self, key: str | bytes, value: Any, kind: str | None = None) -> "GGUFBuilder":
        self.entries.append(entry(key, value, kind))
        return self

    def kvs(self, values: Mapping[str, Any]) -> "GGUFBuilder":
        for key, value in values.items():
            self.kv(key, value)
        return self

    def raw_entry(self, raw: bytes) -> "GGUFBuilder":
        """An entry given as bytes, right or wrong."""
        self.entries.append(raw)
        return self

    def tensor(
        self,
        name: str | bytes,
        shape: Sequence[int],
        kind: str | int = "F32",
        data: bytes | np.ndarray | None = None,
        offset: int | None = None,
    ) -> "GGUFBuilder":
        """A tensor of torch-order `shape`: `data` its stored bytes (None: zeros), `offset` to override."""
        if data is None:
            data = bytes(tensor_nbytes(shape, kind)) if isinstance(kind, str) and min(shape) > 0 else b""
        raw = data.tobytes() if isinstance(data, np.ndarray) else data
        self.tensors.append(_Tensor(name, tuple(shape), kind, raw, offset))
        return self

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def build(self) -> bytes:
        counts = (
            len(self.tensors) if self.tensor_count_field is None else self.tensor_count_field,
            len(self.entries) if self.entry_count_field is None else self.entry_count_field,
        )
        head = self.magic + struct.pack("<Iqq", self.version, *counts) + b"".join(self.entries)
        data = b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            number = tensor.kind if isinstance(tensor.kind, int) else TENSOR_CODES[tensor.kind][0]
            ne = tensor.shape[::-1]
            head += string(tensor.name) + struct.pack(f"<I{len(ne)}qIQ", len(ne), *ne, number, offset)
            data += tensor.data
            data += bytes(self._padded(len(data)) - len(data))
        if not self.tensors:
            return head
        return head + bytes(self._padded(len(head)) - len(head)) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def spm_vocabulary(pieces: Sequence[str] = ("\u2581a", "\u2581the", "a", "b", "\u2581")) -> dict[str, Any]:
    """Tokenizer metadata of a small SentencePiece-style vocabulary: 3 special, 256 byte tokens, `pieces`."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def byte_level_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE (GPT-2) writes for the bytes 0 to 255, in byte order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256))
    return [chr(b) if b in visible else chr(256 + next(hidden)) for b in range(256)]


def bpe_vocabulary(
    merges: Sequence[str] = ("t h", "th e", "\u0120 the"),
    special: Sequence[str] = ("<|endoftext|>",),
    pre: str = "gpt-2",
) -> dict[str, Any]:
    """Tokenizer metadata of a small byte-level BPE vocabulary: bytes, the merges' results, control tokens."""
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_level_alphabet(), *merged, *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (256 + len(merged)) + [3] * len(special), np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - len(special),
        "tokenizer.ggml.eos_token_id": len(tokens) - len(special),
    }


TAPS = 3
"""Positions that a convolution reads."""

BLOCK = {
    "attn_norm.weight": "d",
    "attn_q.weight": "q d",
    "attn_k.weight": "kv d",
    "attn_v.weight": "kv d",
    "attn_output.weight": "d q",
    "ffn_norm.weight": "d",
    "ffn_gate.weight": "f d",
    "ffn_up.weight": "f d",
    "ffn_down.weight": "d f",
}
"""A layer's tensors: rows and columns as sizes of `ModelSizes.tensor_shapes`."""

MIXTURE = {
    "ffn_gate.weight": "",
    "ffn_up.weight": "",
    "ffn_down.weight": "",
    "ffn_gate_inp.weight": "e d",
    "ffn_gate_exps.weight": "e x d",
    "ffn_up_exps.weight": "e x d",
    "ffn_down_exps.weight": "e d x",
}
"""What a layer with experts has besides or otherwise."""

GATE_UP = {"ffn_gate_exps.weight": "", "ffn_up_exps.weight": "", "ffn_gate_up_exps.weight": "e 2x d"}
"""What it has otherwise where gate and up of all experts are in one tensor."""

SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "d",
    "ffn_gate_shexp.weight": "s d",
    "ffn_up_shexp.weight": "s d",
    "ffn_down_shexp.weight": "d s",
}

GATED_ATTENTION = {
    "attn_q.weight": "2q d",
    "attn_q_norm.weight": "h",
    "attn_k_norm.weight": "h",
    "ffn_norm.weight": "",
    "post_attention_norm.weight": "d",
}

LATENT = {
    **dict.fromkeys((f"attn_{name}.weight" for name in "qkv"), ""),
    "attn_q_a.weight": "qr d",
    "attn_q_a_norm.weight": "qr",
    "attn_q_b.weight": "lq qr",
    "attn_kv_a_mqa.weight": "cr d",
    "attn_kv_a_norm.weight": "lr",
    "attn_k_b.weight": "n lr p",
    "attn_v_b.weight": "n h lr",
    "ffn_gate_shexp.weight": "s d",
    "ffn_up_shexp.weight": "s d",
    "ffn_down_shexp.weight": "d s",
}

CHANGES = {
    "deepseek2": {**LATENT, "exp_probs_b.bias": "e"},
    "mistral4": LATENT,
    "qwen2moe": {"attn_q.bias": "q", "attn_k.bias": "kv", "attn_v.bias": "kv", **SHARED_EXPERT},
    "qwen3moe": {"attn_q_norm.weight": "h", "attn_k_norm.weight": "h"},
    "glm4moe": {
        "attn_q.bias": "q",
        "attn_k.bias": "kv",
        "attn_v.bias": "kv",
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "ffn_norm.weight": "",
        "post_attention_norm.weight": "d",
        "exp_probs_b.bias": "e",
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
    "gpt-oss": {
        "attn_q.bias": "q",
        "attn_k.bias": "kv",
        "attn_v.bias": "kv",
        "attn_output.bias": "d",
        "attn_sinks.weight": "n",
        "ffn_norm.weight": "",
        "post_attention_norm.weight": "d",
        "ffn_gate_inp.bias": "e",
        "ffn_gate_exps.bias": "e x",
        "ffn_up_exps.bias": "e x",
        "ffn_down_exps.bias": "e d",
    },
    "olmoe": {"attn_q_norm.weight": "q", "attn_k_norm.weight": "kv"},
    "qwen2": {"attn_q.bias": "q", "attn_k.bias": "kv", "attn_v.bias": "kv"},
    "qwen3": {"attn_q_norm.weight": "h", "attn_k_norm.weight": "h"},
    "olmo2": {
        "attn_norm.weight": "",
        "ffn_norm.weight": "",
        "attn_q_norm.weight": "q",
        "attn_k_norm.weight": "kv",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
    },
    "gemma2": {"post_attention_norm.weight": "d", "post_ffw_norm.weight": "d"},
    "gemma3n": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
        "inp_gate.weight": "li d",
        "proj.weight": "d li",
        "post_norm.weight": "d",
        "altup_router.weight": "au d",
        "altup_router_norm.weight": "d",
        "altup_predict_coef.weight": "aa au",
        "altup_correct_coef.weight": "au au",
        "altup_correct_scale.weight": "d",
        "laurel_l.weight": "ar d",
        "laurel_r.weight": "d ar",
        "laurel_post_norm.weight": "d",
    },
    "gemma4": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
        "layer_output_scale.weight": "1",
    },
    "gemma-embedding": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
    },
    "gemma3": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
    },
    "modern-bert": {
        "attn_q.weight": "",
        "attn_k.weight": "",
        "attn_v.weight": "",
        "ffn_gate.weight": "",
        "attn_qkv.weight": "qkv d",
        "ffn_up.weight": "2f d",
    },
    "phi3": {
        "attn_q.weight": "",
        "attn_k.weight": "",
        "attn_v.weight": "",
        "ffn_gate.weight": "",
        "attn_qkv.weight": "qkv d",
        "ffn_up.weight": "2f d",
    },
    "exaone4": {
        "attn_norm.weight": "",
        "ffn_norm.weight": "",
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
    },
    "openelm": {
        "attn_q.weight": "",
        "attn_k.weight": "",
        "attn_v.weight": "",
        "attn_qkv.weight": "qkv d",
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
    },
    "glm4": {
        "attn_q.bias": "q",
        "attn_k.bias": "kv",
        "attn_v.bias": "kv",
        "post_attention_norm.weight": "d",
        "post_ffw_norm.weight": "d",
        "ffn_gate.weight": "",
        "ffn_up.weight": "2f d",
    },
    "ernie4_5-moe": {
        "exp_probs_b.bias": "e",
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
    "dots1": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "exp_probs_b.bias": "e",
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
    "bailingmoe2": {
        "attn_q.weight": "",
        "attn_k.weight": "",
        "attn_v.weight": "",
        "attn_qkv.weight": "qkv d",
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "exp_probs_b.bias": "e",
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
    "minimax-m2": {
        "attn_q_norm.weight": "q",
        "attn_k_norm.weight": "kv",
        "exp_probs_b.bias": "e",
    },
    "qwen2vl": {
        "attn_q.bias": "q",
        "attn_k.bias": "kv",
        "attn_v.bias": "kv",
    },
    "qwen3vl": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
    },
    "qwen3vlmoe": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
    },
    "hunyuan-dense": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
    },
    "hunyuan-moe": {
        "attn_q_norm.weight": "h",
        "attn_k_norm.weight": "h",
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
    "seed_oss": {
        "attn_q.bias": "q",
        "attn_k.bias": "kv",
        "attn_v.bias": "kv",
        "ffn_norm.weight": "",
        "post_attention_norm.weight": "d",
    },
    "arcee": {"ffn_gate.weight": ""},
    "cohere2": {"ffn_norm.weight": ""},
    "llama4": {
        "ffn_gate_shexp.weight": "x d",
        "ffn_up_shexp.weight": "x d",
        "ffn_down_shexp.weight": "d x",
    },
    "qwen35": GATED_ATTENTION,
    "qwen35moe": {**GATED_ATTENTION, **SHARED_EXPERT},
    "qwen3next": {**GATED_ATTENTION, **SHARED_EXPERT},
    "lfm2": {"attn_q_norm.weight": "h", "attn_k_norm.weight": "h"},
    "lfm2moe": {"attn_q_norm.weight": "h", "attn_k_norm.weight": "h", "exp_probs_b.bias": "e"},
    "granitehybrid": {
        "ffn_gate_shexp.weight": "s d",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
}
"""Architecture -> what other layers than llama's have besides or otherwise; "" for tensors that they lack."""

GATED_DELTA = {
    **dict.fromkeys((f"attn_{name}.weight" for name in ("q", "k", "v", "q_norm", "k_norm", "output")), ""),
    "attn_qkv.weight": "c d",
    "attn_gate.weight": "dv d",
    "ssm_beta.weight": "nv d",
    "ssm_alpha.weight": "nv d",
    "ssm_conv1d.weight": "c t",
    "ssm_dt.bias": "nv",
    "ssm_a": "nv",
    "ssm_norm.weight": "hv",
    "ssm_out.weight": "d dv",
}
"""What layers that are gated delta nets, the even ones, have besides or otherwise."""

DELTA = {"key_heads": 1, "value_heads": 2, "delta_head_dim": 8}
"""The least sizes of such layers."""

GATED_DELTAS = {
    "qwen35": GATED_DELTA,
    "qwen35moe": GATED_DELTA,
    "qwen3next": {**GATED_DELTA, "ssm_beta.weight": "", "ssm_alpha.weight": "", "ssm_ba.weight": "2nv d"},
}
"""Architectures with such layers."""

CONVOLUTION = {
    "attn_q.weight": "",
    "attn_k.weight": "",
    "attn_v.weight": "",
    "attn_q_norm.weight": "",
    "attn_k_norm.weight": "",
    "attn_output.weight": "",
    "shortconv.in_proj.weight": "3d d",
    "shortconv.conv.weight": "d t",
    "shortconv.out_proj.weight": "d d",
}
"""What layers that are convolutions, the even ones, have besides or otherwise."""

CONVOLVED = ("lfm2", "lfm2moe")
"""Architectures with such layers."""

MAMBA = {
    **dict.fromkeys((f"attn_{name}.weight" for name in ("q", "k", "v", "output")), ""),
    "ssm_in.weight": "mi d",
    "ssm_conv1d.weight": "mc t",
    "ssm_conv1d.bias": "mc",
    "ssm_dt.bias": "mn",
    "ssm_a": "mn 1",
    "ssm_d": "mn 1",
    "ssm_norm.weight": "mg mw",
    "ssm_out.weight": "d mv",
}
"""What Mamba2 layers, the even ones or every third, have besides or otherwise."""

MAMBA_SIZES = {"mamba_heads": 2, "mamba_head_dim": 8, "mamba_groups": 1, "mamba_state": 8}
"""The least sizes of such layers."""

MAMBAS = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures with such layers."""

LONE = {
    "nemotron_h": {"attn_norm.weight": "d", "ffn_up.weight": "f d", "ffn_down.weight": "d f"},
    "nemotron_h_moe": {
        "attn_norm.weight": "d",
        **{name: letters for name, letters in MIXTURE.items() if letters and "gate_exps" not in name},
        "exp_probs_b.bias": "e",
        "ffn_up_shexp.weight": "s d",
        "ffn_down_shexp.weight": "d s",
    },
}
"""Architectures whose layers are Mamba2, attention and a feed-forward in turns -> the tensors of the third."""

GROWING = ("openelm",)
"""Architectures whose odd layers have twice as many heads, and feed-forwards of twice the length."""

UNSHARED = ("gemma3n",)
"""Architectures whose layers devices do not share."""

STREAMS, LAUREL_RANK, LAYER_INPUT = 4, 32, 32
"""Of alternating updates and per-layer embeddings."""

WIDENING = ("gemma4",)
"""Architectures whose even layers have a window, and whose odd ones have heads of twice the elements, and no values."""

DENSE_BESIDE = {
    "ffn_gate.weight": "f d",
    "ffn_up.weight": "f d",
    "ffn_down.weight": "d f",
    "post_ffw_norm_1.weight": "d",
    "pre_ffw_norm_2.weight": "d",
    "post_ffw_norm_2.weight": "d",
    "ffn_gate_inp.scale": "d",
    "ffn_down_exps.scale": "e",
}
"""What layers of such architectures have besides or otherwise where they have experts."""

LAYER_NORMED = ("cohere2", "bert", "nomic-bert", "jina-bert-v3", "modern-bert")
"""Architectures whose norms are LayerNorms."""

ENCODERS = ("bert", "nomic-bert", "jina-bert-v3", "modern-bert", "gemma-embedding")
"""Architectures whose positions all see each other."""

SUMMED = ("bert", "nomic-bert", "jina-bert-v3")
"""Those of them whose norms are of sums, with tables of their own."""

EQUALLY_HEADED = (*SUMMED, "modern-bert")
"""Those of them with as many heads of keys and values as of queries."""

LATENTS = ("deepseek2", "mistral4")
"""Architectures with latent attention."""

MIXTURES = {
    "deepseek2": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "mistral4": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "qwen2moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "qwen3moe": ("expert_feed_forward_length",),
    "olmoe": (),
    "glm4moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "granitemoe": (),
    "gpt-oss": ("expert_feed_forward_length",),
    "ernie4_5-moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "dots1": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "bailingmoe2": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "minimax-m2": ("expert_feed_forward_length",),
    "qwen3vlmoe": ("expert_feed_forward_length",),
    "llama4": ("expert_feed_forward_length",),
    "hunyuan-moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "lfm2moe": ("expert_feed_forward_length",),
    "qwen35moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "qwen3next": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "granitehybrid": ("expert_shared_feed_forward_length",),
    "nemotron_h_moe": ("expert_feed_forward_length", "expert_shared_feed_forward_length"),
}
"""Architectures whose models always have experts -> the keys that their files have for the experts' lengths."""


@dataclass
class ModelSizes:
    """The sizes of a model small enough to build in memory.

    experts: of a layer; None: 4 in architectures that always have some, and none in others.
    separate: a tensor for each expert, as in old files. gate_up: one for gate and up of all experts.
    """

    architecture: str = "llama"
    blocks: int = 2
    embedding: int = 64
    feed_forward: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 128
    experts: int | None = None
    experts_used: int = 2
    expert_feed_forward: int = 32
    shared_feed_forward: int = 64
    key_heads: int = 4
    value_heads: int = 8
    delta_head_dim: int = 32
    latent_rank: int = 32
    query_rank: int = 32
    mamba_heads: int = 4
    mamba_head_dim: int = 32
    mamba_groups: int = 4
    mamba_state: int = 16
    separate: bool = False
    gate_up: bool = False

    def __post_init__(self) -> None:
        self.blocks = max(self.blocks, 3) if self.architecture in LONE else self.blocks
        if self.experts is None:
            self.experts = 4 if self.architecture in MIXTURES else 0
        if self.architecture in EQUALLY_HEADED:
            self.kv_heads = self.heads
        if self.architecture == "llama4":
            self.experts_used = 1  # they weigh their input
        if "expert_feed_forward_length" not in MIXTURES.get(self.architecture, ()):
            self.expert_feed_forward = self.feed_forward  # no key says another

    def metadata(self) -> dict[str, Any]:
        """The metadata a converter writes for these sizes."""
        a = self.architecture
        return {
            "general.architecture": a,
            "general.name": f"tiny {a}",
            f"{a}.block_count": self.blocks,
            f"{a}.context_length": self.context,
            f"{a}.embedding_length": self.embedding,
            f"{a}.feed_forward_length": self._lengths(),
            f"{a}.attention.head_count": self._of_layers(self.heads),
            f"{a}.attention.head_count_kv": self._kv_heads(),
            **self._head_lengths(),
            f"{a}.attention.{'layer_norm' if a in LAYER_NORMED else 'layer_norm_rms'}_epsilon": 1e-5,
            **self._of_cohere(),
            **(
                {f"{a}.attention.causal": False, f"{a}.attention.head_count_kv": self.heads}
                if a in EQUALLY_HEADED
                else {}
            ),
            **({f"{a}.interleave_moe_layer_step": 1} if a == "llama4" else {}),
            f"{a}.rope.dimension_count": self._rotated,
            f"{a}.rope.freq_base": 10000.0,
            **({f"{a}.shortconv.l_cache": TAPS} if a in CONVOLVED else {}),
            **self._windows(),
            **self._altup(),
            **self._gated_delta(),
            **self._mamba(),
            **self._mixture(),
        }

    def _of_cohere(self) -> dict[str, Any]:
        if self.architecture != "cohere2":
            return {}
        return {"cohere2.attention.sliding_window": 4, "cohere2.logit_scale": 0.25}

    @property
    def _rotated(self) -> int:
        return self.head_dim // 2 if self.architecture in LATENTS else self.head_dim

    def _head_lengths(self) -> dict[str, Any]:
        a, size = self.architecture, self.head_dim
        if a not in LATENTS:
            return {f"{a}.attention.key_length": size, f"{a}.attention.value_length": size}
        lengths = {"key_length": self.latent_rank + self._rotated, "value_length": self.latent_rank}
        lengths |= {"key_length_mla": 2 * size + self._rotated, "value_length_mla": size}
        lengths |= {"q_lora_rank": self.query_rank, "kv_lora_rank": self.latent_rank}
        return {f"{a}.attention.{key}": length for key, length in lengths.items()}

    def _gated_delta(self) -> dict[str, Any]:
        a = self.architecture
        if a not in GATED_DELTAS:
            return {}
        sizes = {
            "ssm.conv_kernel": TAPS,
            "ssm.state_size": self.delta_head_dim,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.value_heads * self.delta_head_dim,
            "full_attention_interval": 2,
        }
        counts = [len(range(position, self.head_dim // 2, 3)) for position in range(3)]
        sections = {} if a == "qwen3next" else {"rope.dimension_sections": [*counts, 0]}
        return {f"{a}.{key}": value for key, value in {**sizes, **sections}.items()}

    def _windows(self) -> dict[str, Any]:
        a = self.architecture
        if a in ENCODERS and a not in SUMMED:
            return {f"{a}.attention.sliding_window": 8}
        if a not in WIDENING:
            return {}
        keys = {
            "attention.key_length": 2 * self.head_dim,
            "attention.value_length": 2 * self.head_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [layer % 2 == 0 for layer in range(self.blocks)],
            "rope.dimension_count": 2 * self.head_dim,
            "rope.dimension_count_swa": self.head_dim,
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 30.0,
        }
        if self.experts:
            keys["expert_feed_forward_length"] = self.expert_feed_forward
        return {f"{a}.{key}": value for key, value in keys.items()}

    def _altup(self) -> dict[str, Any]:
        a = self.architecture
        if a not in UNSHARED:
            return {}
        keys = {
            "altup.num_inputs": STREAMS,
            "altup.active_idx": 0,
            "activation_sparsity_scale": [1.5, *[float("-inf")] * (self.blocks - 1)],
            "embedding_length_per_layer_input": LAYER_INPUT,
            "attention.shared_kv_layers": 0,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [layer % 2 == 0 for layer in range(self.blocks)],
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 30.0,
        }
        return {f"{a}.{key}": value for key, value in keys.items()}

    def _mamba(self) -> dict[str, Any]:
        a = self.architecture
        if a not in MAMBAS:
            return {}
        sizes: dict[str, float] = {
            "ssm.conv_kernel": TAPS,
            "ssm.state_size": self.mamba_state,
            "ssm.group_count": self.mamba_groups,
            "ssm.time_step_rank": self.mamba_heads,
            "ssm.inner_size": self.mamba_heads * self.mamba_head_dim,
        }
        if a in LONE:
            sizes["attention.layer_norm_epsilon"] = 1e-5
        return {f"{a}.rope.scaling.finetuned": False, **{f"{a}.{key}": value for key, value in sizes.items()}}

    def _lengths(self) -> int | list[int]:
        """Of all layers, or of each."""
        if self.architecture not in LONE:
            return self._of_layers(self.feed_forward)
        length = self.expert_feed_forward if self.experts else self.feed_forward
        return [length if layer % 3 == 2 else 0 for layer in range(self.blocks)]

    def _kv_heads(self) -> int | list[int]:
        """Of all layers, or of each."""
        if self.architecture in LATENTS:
            return 1
        if self.architecture in LONE:
            return [self.kv_heads if layer % 3 == 1 else 0 for layer in range(self.blocks)]
        if self.architecture not in CONVOLVED and self.architecture != "granitehybrid":
            return self._of_layers(self.kv_heads)
        return [self.kv_heads if layer % 2 else 0 for layer in range(self.blocks)]

    def _of_layers(self, size: int) -> int | list[int]:
        """Of all layers, or of each."""
        if self.architecture not in GROWING:
            return size
        return [size * self._times(layer) for layer in range(self.blocks)]

    def _times(self, layer: int) -> int:
        return 1 + layer % 2 if self.architecture in GROWING else 1

    def _mixture(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        a = self.architecture
        lengths = {"expert_feed_forward_length": self.expert_feed_forward}
        lengths["expert_shared_feed_forward_length"] = self.shared_feed_forward
        counts = {"expert_count": self.experts, "expert_used_count": self.experts_used}
        counts |= {key: lengths[key] for key in MIXTURES.get(a, ())}
        return {f"{a}.{key}": value for key, value in counts.items()}

    def tensor_shapes(self, vocab: int, tied: bool = False) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model and its torch-order shape."""
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, self.embedding)}
        if self.architecture in SUMMED:
            return shapes | self._bert_shapes()
        for i in range(self.blocks):
            wider = self.architecture in WIDENING and i % 2 == 1
            sizes = self._letters(self._times(i), 1 + wider)
            block = BLOCK | (MIXTURE if self.experts else {}) | CHANGES.get(self.architecture, {})
            block |= DENSE_BESIDE if self.experts and self.architecture in WIDENING else {}
            block |= {"attn_v.weight": ""} if wider else {}
            block |= GATE_UP if self.gate_up else {}
            if i % 2 == 0:
                block |= CONVOLUTION if self.architecture in CONVOLVED else {}
                block |= GATED_DELTAS.get(self.architecture, {})
                block |= MAMBA if self.architecture in MAMBAS else {}
            if self.architecture in LONE:
                block = self._lone(i % 3)
            for name, letters in block.items():
                shape = tuple(sizes[size] for size in letters.split())
                if self.separate and name.endswith("_exps.weight"):
                    one = f"blk.{i}.{name.removesuffix('_exps.weight')}"
                    shapes |= {f"{one}.{expert}.weight": shape[1:] for expert in range(shape[0])}
                elif shape:
                    shapes[f"blk.{i}.{name}"] = shape
        if self.architecture in UNSHARED:
            shapes |= self._top_of_altup(vocab)
        if self.architecture in WIDENING:
            shapes["rope_freqs.weight"] = (self.head_dim,)
        norm = "token_embd_norm" if self.architecture in CONVOLVED else "output_norm"
        shapes[f"{norm}.weight"] = (self.embedding,)
        if self.architecture == "modern-bert":
            shapes["token_embd_norm.weight"] = (self.embedding,)
            del shapes["blk.0.attn_norm.weight"]
        if not tied and self.architecture not in ENCODERS:
            shapes["output.weight"] = (vocab, self.embedding)
        return shapes

    def _top_of_altup(self, vocab: int) -> dict[str, tuple[int, ...]]:
        every, d = self.blocks * LAYER_INPUT, self.embedding
        return {
            "per_layer_token_embd.weight": (vocab, every),
            "per_layer_model_proj.weight": (every, d),
            "per_layer_proj_norm.weight": (LAYER_INPUT,),
            "altup_proj.weight": (STREAMS - 1, d, d),
            "altup_unembd_proj.weight": (STREAMS - 1, d, d),
        }

    def _bert_shapes(self) -> dict[str, tuple[int, ...]]:
        d, f, q = self.embedding, self.feed_forward, self.heads * self.head_dim
        matrices = {"attn_q": (q, d), "attn_k": (q, d), "attn_v": (q, d), "attn_output": (d, q)}
        matrices |= {"ffn_up": (f, d), "ffn_down": (d, f)}
        found: dict[str, tuple[int, ...]] = {"token_types.weight": (2, d)}
        if self.architecture == "bert":
            found["position_embd.weight"] = self.context, d
        else:
            gate = {"ffn_gate": (f, d)} if self.architecture == "nomic-bert" else {}
            matrices = {"attn_qkv": (3 * q, d), "attn_output": (d, q), **gate} | {
                name: shape for name, shape in matrices.items() if name.startswith("ffn")
            }
        found |= {f"token_embd_norm.{kind}": (d,) for kind in ("weight", "bias")}
        for i in range(self.blocks):
            for name, shape in matrices.items():
                found[f"blk.{i}.{name}.weight"] = shape
                found |= {} if self.architecture == "nomic-bert" else {f"blk.{i}.{name}.bias": shape[:1]}
            for norm in ("attn_output_norm", "layer_output_norm"):
                found |= {f"blk.{i}.{norm}.{kind}": (d,) for kind in ("weight", "bias")}
        return found

    def _lone(self, turn: int) -> dict[str, str]:
        """The tensors of a layer that is Mamba2, attention or a feed-forward, by turns."""
        if turn == 2:
            return LONE[self.architecture]
        mixer = {name: letters for name, letters in BLOCK.items() if name.startswith("attn")}
        return mixer if turn else mixer | MAMBA

    def _letters(self, times: int, wider: int = 1) -> dict[str, int]:
        """What the letters of a layer's shapes stand for; `times` as many heads and columns as `self` has, of `wider`
        times as many elements."""
        head_dim = wider * self.head_dim
        q, kv, f = (
            times * size for size in (self.heads * head_dim, self.kv_heads * head_dim, self.feed_forward)
        )
        sizes = {"d": self.embedding, "f": f, "2f": 2 * f, "h": head_dim, "1": 1}
        sizes |= {"q": q, "kv": kv, "qkv": q + 2 * kv, "n": times * self.heads}
        sizes |= {"e": self.experts or 0, "x": self.expert_feed_forward, "s": self.shared_feed_forward}
        sizes |= {"2x": 2 * self.expert_feed_forward, "3d": 3 * self.embedding, "t": TAPS}
        sizes |= {"qr": self.query_rank, "lr": self.latent_rank, "cr": self.latent_rank + self._rotated}
        sizes |= {"p": 2 * self.head_dim, "lq": self.heads * (2 * self.head_dim + self._rotated)}
        values = self.value_heads * self.delta_head_dim
        sizes |= {"2q": 2 * q, "c": 2 * self.key_heads * self.delta_head_dim + values, "dv": values}
        inner, of_b = self.mamba_heads * self.mamba_head_dim, self.mamba_groups * self.mamba_state
        sizes |= {"mi": 2 * (inner + of_b) + self.mamba_heads, "mc": inner + 2 * of_b, "mv": inner, "1": 1}
        sizes |= {"mn": self.mamba_heads, "mg": self.mamba_groups, "mw": inner // self.mamba_groups}
        sizes |= {"au": STREAMS, "aa": STREAMS**2, "ar": LAUREL_RANK, "li": LAYER_INPUT}
        return sizes | {"nv": self.value_heads, "2nv": 2 * self.value_heads, "hv": self.delta_head_dim}


def model_builder(
    sizes: ModelSizes | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    tied: bool = False,
    changes: Mapping[str, Any] | None = None,
    kind: str = "F32",
) -> GGUFBuilder:
    """A whole small model with zero weights. `changes` replaces metadata; a value of None drops the key."""
    sizes = sizes or ModelSizes()
    vocabulary = vocabulary or spm_vocabulary()
    metadata = {**sizes.metadata(), **vocabulary, **(changes or {})}
    builder = GGUFBuilder().kvs({k: v for k, v in metadata.items() if v is not None})
    for name, shape in sizes.tensor_shapes(len(vocabulary["tokenizer.ggml.tokens"]), tied).items():
        ones = np.ones(shape, "<f4") if name == "rope_freqs.weight" else None  # of 0 there are none
        builder.tensor(
            name, shape, kind if len(shape) > 1 and shape[-1] not in (1, TAPS, STREAMS) else "F32", ones
        )
    return builder
