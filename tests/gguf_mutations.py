"""Damages GGUF files on purpose, knowing where their fields lie, and reads the result through everything we have.

`Mutator` makes one damaged file per case number, the same for the same number. `read_everything` opens a file as a
user's would be: reader, configuration, tensor table, vocabulary. Anything but success or an EngineError is a bug.
"""

import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.gguf.vocab_checks import check_vocabulary
from quengine.models.model_summary import summarize
from quengine.models.tensor_table import check_tensors
from tests.gguf_builder import (
    DELTA,
    ENCODERS,
    MAMBA_SIZES,
    GGUFBuilder,
    ModelSizes,
    bpe_vocabulary,
    entry,
    model_builder,
)

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_VALUES = [
    (3, "uint8"),
    (-1, "int32"),
    (2**40, "uint64"),
    (1.0, "float32"),
    (float("nan"), "float64"),
    (True, "bool"),
    ("", "string"),
    ("llama", "string"),
    ([], "string"),
    (["a", "b"], "string"),
    ([1, 2], "int32"),
    ([1, 1], "uint16"),
    ([0.5], "float32"),
    ([True], "bool"),
]
_CLAIMS: list[tuple[str, object, str]] = [
    *(("general.alignment", value, "uint32") for value in (0, 1, 3, 33, 1 << 31)),
    *(("split.count", value, "uint16") for value in (0, 2, 65535)),
    *(("split.no", value, "uint16") for value in (1, 65535)),
    ("split.tensors.count", -1, "int32"),
    ("general.architecture", "llama\0qwen2", "string"),
    ("general.name", "\0" * 100, "string"),
    ("tokenizer.ggml.tokens", [1, 2], "int32"),
    ("tokenizer.ggml.tokens", ["a", "a\0", ""], "string"),
    ("tokenizer.ggml.scores", ["a"], "string"),
    ("tokenizer.ggml.token_type", [0.5], "float32"),
    ("tokenizer.ggml.merges", ["a", " ", "\0 \0"], "string"),
    ("tokenizer.ggml.eos_token_id", 1 << 31, "uint32"),
    ("tokenizer.chat_template", "{{" * 5000, "string"),
]
_FLOATS = [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 1e38]


@dataclass(frozen=True)
class Field:
    """A number in a part: `size` bytes at `offset`; `is_float` for a float32 or float64."""

    offset: int
    size: int
    is_float: bool = False


@dataclass(frozen=True)
class Part:
    """One metadata entry or tensor description: its bytes, its lengths, types and counts, and its values."""

    raw: bytes
    key: bytes
    structure: list[Field]
    values: list[Field]


@dataclass(frozen=True)
class Seed:
    """A whole file in parts."""

    entries: list[Part]
    infos: list[Part]
    data: bytes

    def assemble(self) -> bytes:
        """The file, with counts and padding as they must be."""
        head = b"GGUF" + struct.pack("<Iqq", 3, len(self.infos), len(self.entries))
        head += b"".join(part.raw for part in (*self.entries, *self.infos))
        return head + (bytes(-len(head) % 32) + self.data if self.data else b"")


def seed_of(builder: GGUFBuilder) -> Seed:
    """The file that `builder` makes, in parts."""
    whole = builder.build()
    entries = [_entry_part(raw) for raw in builder.entries]
    at = 24 + sum(len(part.raw) for part in entries)
    infos = []
    for tensor in builder.tensors:
        name = tensor.name if isinstance(tensor.name, bytes) else tensor.name.encode()
        shape_at = 8 + len(name) + 4
        type_at = shape_at + 8 * len(tensor.shape)
        structure = [Field(0, 8), Field(shape_at - 4, 4), Field(type_at, 4), Field(type_at + 4, 8)]
        shape = [Field(shape_at + 8 * i, 8) for i in range(len(tensor.shape))]
        infos.append(Part(whole[at : at + type_at + 12], name, structure, shape))
        at += type_at + 12
    return Seed(entries, infos, whole[at + -at % 32 :])


def _entry_part(raw: bytes) -> Part:
    (length,) = struct.unpack_from("<Q", raw)
    at = 8 + length
    (kind,) = struct.unpack_from("<I", raw, at)
    structure, values = [Field(0, 8), Field(at, 4)], []
    at += 4
    if kind == _STRING:
        structure.append(Field(at, 8))
        values += [Field(at + 8 + i, 1) for i in range(len(raw) - at - 8)]
    elif kind != _ARRAY:
        values.append(Field(at, _SIZES[kind], kind in (6, 12)))
    else:
        element, count = struct.unpack_from("<IQ", raw, at)
        structure += [Field(at, 4), Field(at + 4, 8)]
        at += 12
        for _ in range(count):
            size = struct.unpack_from("<Q", raw, at)[0] if element == _STRING else _SIZES[element]
            if element == _STRING:
                structure.append(Field(at, 8))
                at += 8
                values += [Field(at + i, 1) for i in range(size)]
            else:
                values.append(Field(at, size, element in (6, 12)))
            at += size
    return Part(raw, raw[8 : 8 + length], structure, values)


OTHERS: dict[str, dict[str, object]] = {
    "olmo2": {"olmo2.rope.freq_base": 5e5},
    "gemma3": {
        "gemma3.attention.sliding_window": 4,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 2e4,
    },
    "gemma2": {"gemma2.attention.sliding_window": 4, "gemma2.attn_logit_softcapping": 20.0},
    "gemma4": {"gemma4.attention.shared_kv_layers": 0, "gemma4.embedding_length_per_layer_input": 0},
    "gemma3n": {},
    **{
        name: {
            f"{name}.expert_shared_count": 1,
            f"{name}.leading_dense_block_count": 0,
            f"{name}.expert_gating_func": 2,
        }
        for name in ("deepseek2", "mistral4")
    },
    "granite": {
        "granite.attention.scale": 0.25,
        "granite.embedding_scale": 12.0,
        "granite.residual_scale": 0.22,
        "granite.logit_scale": 8.0,
    },
    "phi3": {
        "phi3.attention.sliding_window": 4,
        "phi3.rope.dimension_count": 2,
        "phi3.rope.scaling.original_context_length": 16,
        "phi3.rope.scaling.attn_factor": 1.25,
    },
    "qwen2moe": {
        "qwen2moe.expert_gating_func": 1,
        "qwen2moe.expert_weights_norm": False,
        "qwen2moe.expert_weights_scale": 1.5,
        "qwen2moe.expert_group_count": 2,
        "qwen2moe.expert_group_used_count": 1,
    },
    "glm4moe": {
        "glm4moe.expert_shared_feed_forward_length": None,
        "glm4moe.expert_shared_count": 2,
        "glm4moe.expert_gating_func": 2,
        "glm4moe.expert_weights_scale": 2.5,
        "glm4moe.rope.dimension_count": 2,
        "glm4moe.nextn_predict_layers": 1,
        "glm4moe.block_count": 2,
    },
    "deepseek2": {
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 4.0,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
        "deepseek2.rope.scaling.original_context_length": 16,
        "deepseek2.expert_gating_func": 2,
        "deepseek2.nextn_predict_layers": 0,
    },
    "mistral4": {"mistral4.attention.temperature_scale": 0.1, "mistral4.attention.temperature_length": 16},
    "glm4": {"glm4.rope.dimension_count": 2, "glm4.nextn_predict_layers": 0},
    "ernie4_5-moe": {
        "ernie4_5-moe.leading_dense_block_count": 0,
        "ernie4_5-moe.interleave_moe_layer_step": 1,
    },
    "dots1": {"dots1.expert_weights_norm": True, "dots1.expert_group_count": 1},
    "bailingmoe2": {
        "bailingmoe2.expert_weights_norm": True,
        "bailingmoe2.expert_group_count": 2,
        "bailingmoe2.expert_group_used_count": 1,
        "bailingmoe2.nextn_predict_layers": 0,
    },
    "arcee": {"arcee.attention.scale": 0.0},
    "cohere2": {"cohere2.attention.sliding_window_pattern": 2},
    "llama4": {"llama4.interleave_moe_layer_step": 1, "llama4.attention.sliding_window": 8192},
    "minimax-m2": {"minimax-m2.rope.dimension_count": 2},
    "qwen3vl": {"qwen3vl.rope.dimension_sections": [1, 1, 0, 0]},
    "hunyuan-moe": {"hunyuan-moe.expert_shared_count": 1},
    "granitemoe": {
        "granitemoe.attention.scale": 0.25,
        "granitemoe.residual_scale": 0.22,
        "granitemoe.rope.scaling.finetuned": True,
    },
    "gpt-oss": {
        "gpt-oss.attention.sliding_window": 4,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 32.0,
        "gpt-oss.rope.scaling.original_context_length": 16,
    },
    "qwen3moe": {"qwen3moe.expert_shared_count": 0, "qwen3moe.leading_dense_block_count": 0},
    "olmoe": {"olmoe.expert_used_count": [2], "olmoe.expert_gating_func": 2},
}
"""Other architectures, with keys of their own."""


def _of_others(name: str, sizes: ModelSizes, vocabulary: dict[str, object]) -> GGUFBuilder:
    builder = model_builder(sizes, vocabulary, changes=OTHERS[name])
    if name == "phi3":
        for length in ("long", "short"):
            builder.tensor(f"rope_factors_{length}.weight", (1,), data=b"\0\0\x80?")
    return builder


def _small_spm() -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x41>", "\u2581a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _unigram() -> dict[str, Any]:
    """Unigram's, with a map of normalizations that has none."""
    charsmap = np.frombuffer((1024).to_bytes(4, "little") + bytes(1024), np.uint8)
    return {
        **_small_spm(),
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.precompiled_charsmap": charsmap,
        "tokenizer.ggml.add_eos_token": True,
    }


def seeds() -> list[Seed]:
    """Small whole files: each architecture and kind of vocabulary, scaled rotations, a shard, no tensors."""
    tiny = {"blocks": 1, "embedding": 8, "feed_forward": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}
    bpe = bpe_vocabulary()
    bpe = {k: v[250:] if k.endswith(("tokens", "token_type")) else v for k, v in bpe.items()}
    bpe |= {
        "tokenizer.ggml.merges": ["\u00fb \u00fc"],
        "tokenizer.ggml.tokens": [*"\u00fb\u00fca", "\u00fb\u00fc", *"bcdefg"],
    }
    bpe |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    yarn = {
        "mistral3.rope.scaling.type": "yarn",
        "mistral3.rope.scaling.factor": 4.0,
        "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
        "mistral3.attention.temperature_scale": 0.1,
        "mistral3.attention.sliding_window": 4,
        "general.alignment": 32,
    }
    shard = GGUFBuilder().kv("split.no", 0, "uint16").kv("split.count", 1, "uint16")
    shard.kv("split.tensors.count", 1, "int32").tensor("t", (2, 32), "Q4_0")
    builders = [
        model_builder(ModelSizes("llama", **tiny), _small_spm()).tensor(
            "rope_freqs.weight", (2,), data=b"\0\0\x80?" * 2
        ),
        model_builder(ModelSizes("llama", **tiny, experts=2, separate=True), _small_spm()),
        model_builder(ModelSizes("llama", **tiny, experts=2, gate_up=True), _small_spm()),
        model_builder(ModelSizes("mistral3", **tiny), _small_spm(), changes=yarn),
        model_builder(ModelSizes("qwen2", **tiny), bpe, tied=True),
        model_builder(ModelSizes("qwen3", **tiny), bpe, changes={"qwen3.attention.head_count_kv": [1]}),
        *(_of_others(name, ModelSizes(name, **tiny), bpe) for name in OTHERS),
        *(
            model_builder(ModelSizes(name, **{**tiny, "blocks": 2}), bpe, tied=True)
            for name in ("lfm2", "openelm")
        ),
        *(
            model_builder(ModelSizes(name, **{**tiny, **DELTA, "blocks": 2}), bpe)
            for name in ("qwen35", "qwen3next")
        ),
        *(
            model_builder(ModelSizes(name, **{**tiny, **MAMBA_SIZES, "blocks": 2}), bpe)
            for name in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
        ),
        *(model_builder(ModelSizes(name, **tiny), _unigram()) for name in ENCODERS),
        GGUFBuilder().kvs({**ModelSizes().metadata(), **_small_spm()}),
        shard,
    ]
    return [seed_of(builder) for builder in builders]


class Mutator:
    """Turns a case number into a damaged file.

    Most damage is done to parts, and the file put together as it must be, so that it gets past the header and
    meets the checks behind; the rest is done to the bytes.
    """

    def __init__(self) -> None:
        self.seeds = seeds()

    def case(self, number: int) -> bytes:
        rng = random.Random(number)
        whole = rng.choice(self.seeds)
        seed = Seed(list(whole.entries), list(whole.infos), whole.data)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            rng.choice(
                (_change_value, _change_value, _change_value, _change_structure, _retype, self._rearrange)
            )(rng, seed)
        if rng.random() < 0.2:
            rng.choice((_claim, _claim, _overlap, _nest))(rng, seed)
        data = bytearray(seed.assemble())
        if rng.random() < 0.25:
            for _ in range(rng.choice((1, 1, 3))):
                rng.choice((_set_count, _set_byte, _cut, _insert_bytes))(rng, data)
        return bytes(data)

    def _rearrange(self, rng: random.Random, seed: Seed) -> None:
        """Drops, repeats, swaps or takes over from another file an entry or a tensor description."""
        which = rng.choice(("entries", "infos"))
        parts: list[Part] = getattr(seed, which)
        others: list[Part] = getattr(rng.choice(self.seeds), which)
        if not parts or not others:
            return
        at = rng.randrange(len(parts))
        way = rng.randrange(4)
        if way == 0:
            del parts[at]
        elif way == 1:
            parts.insert(rng.randrange(len(parts) + 1), parts[at])
        elif way == 2:
            parts[at], parts[0] = parts[0], parts[at]
        else:
            parts[at] = rng.choice(others)


def _change_value(rng: random.Random, seed: Seed) -> None:
    _change(rng, rng.choice((seed.entries, seed.entries, seed.infos)), "values")


def _change_structure(rng: random.Random, seed: Seed) -> None:
    _change(rng, rng.choice((seed.entries, seed.infos)), "structure")


def _change(rng: random.Random, parts: list[Part], kind: str) -> None:
    if not parts:
        return
    at = rng.randrange(len(parts))
    part = parts[at]
    fields: list[Field] = getattr(part, kind)
    if not fields:
        return
    field = rng.choice(fields)
    raw = bytearray(part.raw)
    raw[field.offset : field.offset + field.size] = _number(rng, field, raw)
    parts[at] = Part(bytes(raw), part.key, part.structure, part.values)


def _number(rng: random.Random, field: Field, raw: bytearray) -> bytes:
    if field.is_float and rng.random() < 0.7:
        return struct.pack("<f" if field.size == 4 else "<d", rng.choice(_FLOATS))
    old = int.from_bytes(raw[field.offset : field.offset + field.size], "little")
    top = 1 << (8 * field.size)
    near = (old - 1, old + 1, old * 2, old // 2, old ^ 1, len(raw), len(raw) - field.offset)
    far = (
        top - 1,
        top - 2,
        top // 2,
        top // 2 - 1,
        top // 4,
        1 << rng.randrange(8 * field.size),
        rng.randrange(top),
    )
    value = rng.choice((0, 1, 2, 3, 7, 31, 255, *near, *far))
    return (value % top).to_bytes(field.size, "little")


def _claim(rng: random.Random, seed: Seed) -> None:
    """Gives a key of the format itself a value that no file should have: an alignment, parts of a split file, the
    tokenizer's arrays, a name with NUL."""
    key, value, kind = rng.choice(_CLAIMS)
    at = next((at for at, part in enumerate(seed.entries) if part.key == key.encode()), None)
    part = _entry_part(entry(key, value, kind))
    if at is None:
        seed.entries.insert(rng.randrange(len(seed.entries) + 1), part)
    else:
        seed.entries[at] = part


def _overlap(rng: random.Random, seed: Seed) -> None:
    """Gives a tensor the offset of another, or one within it: the description ends with its offset."""
    if len(seed.infos) > 1:
        one, other = rng.sample(range(len(seed.infos)), 2)
        offset = int.from_bytes(seed.infos[other].raw[-8:], "little") + rng.choice((0, 0, 32, -32, 1))
        part = seed.infos[one]
        raw = part.raw[:-8] + (offset % (1 << 64)).to_bytes(8, "little")
        seed.infos[one] = Part(raw, part.key, part.structure, part.values)


def _nest(rng: random.Random, seed: Seed) -> None:
    """Makes a key an array of arrays, some levels deep, or of more elements than any file has bytes."""
    if not seed.entries:
        return
    at = rng.randrange(len(seed.entries))
    part = seed.entries[at]
    head = struct.pack("<Q", len(part.key)) + part.key + struct.pack("<I", _ARRAY)
    if rng.random() < 0.5:
        raw = head + struct.pack("<IQ", _ARRAY, 1) * rng.choice((1, 3, 5000)) + struct.pack("<IQI", 4, 1, 0)
    else:
        raw = head + struct.pack(
            "<IQ", rng.choice((0, 4, 8, 9, 12, 99)), rng.choice((1 << 40, 1 << 61, (1 << 64) - 1))
        )
    seed.entries[at] = Part(raw, part.key, [], [])


def _retype(rng: random.Random, seed: Seed) -> None:
    """Gives a key a value of another type."""
    if not seed.entries:
        return
    at = rng.randrange(len(seed.entries))
    value, kind = rng.choice(_VALUES)
    seed.entries[at] = _entry_part(entry(seed.entries[at].key, value, kind))


def _set_count(rng: random.Random, data: bytearray) -> None:
    field = Field(rng.choice((4, 8, 16)), 8)
    if len(data) >= 24:
        data[field.offset : field.offset + 8] = _number(rng, field, data)


def _set_byte(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _insert_bytes(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 40)))


def read_everything(path: Path) -> str:
    """Opens, checks and describes the file. Returns "ok" or the name of the error that refused it."""
    opened = False
    try:
        with open_gguf(path) as file:
            opened = True
            for tensor in file.tensors.values():
                assert tensor.data.nbytes == tensor.nbytes
                tensor.data.max()
            config = read_gguf_config(file)
            check_tensors(file, config)
            check_vocabulary(file)
    except EngineError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 1000, text
        refused = type(error).__name__
    else:
        refused = "ok"
    assert _describe(path, refused == "ok") == opened
    return refused


def _describe(path: Path, runs: bool) -> bool:
    """Whether the file can be described, as all that open can be; checks that it says whether the model runs."""
    try:
        summary = summarize(path)
    except EngineError:
        return False
    summary.groups()
    if runs:
        assert summary.problem is None
    elif summary.tokenizer is not None and summary.tokenizer.problem is None:
        assert summary.problem is not None
    return True
