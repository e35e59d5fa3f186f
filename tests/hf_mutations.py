"""Damages Hugging Face folders on purpose, knowing what is in them, and reads the result through everything we have.

`Mutator` makes one damaged folder per case number, the same for the same number. `read_everything` opens a folder as
a user's would be: configuration, weights, tokenizer, chat template. Anything but success or an EngineError is a bug.
"""

import copy
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from quengine.errors import EngineError
from quengine.models.checkpoint import open_checkpoint
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.hf_checkpoint import HFTensors
from quengine.models.hf.hf_shards import StoredTensor
from quengine.models.model_summary import summarize
from quengine.models.template.chat_template import ChatTemplate, encode_chat
from quengine.models.tokenizer import Tokenizer
from tests.gguf_builder import DELTA, ModelSizes, byte_level_alphabet
from tests.hf_writer import fused, hf_config, hf_name, packed, random_weights, within_others, write_hf

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION, TEMPLATE, WEIGHTS = "generation_config.json", "chat_template.jinja", "model.safetensors"
INDEX = "model.safetensors.index.json"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "How are you <|im_end|> 12 <b>é 語?"}]
TEXTS = ("Hello, the world 1234!", "a" * 4000, "   \n\n  tabs\t\u00e9 語言 🙂 <|im_end|><s>", "")

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**18, 10**30, 10**200, 10**5000, 0.5, -0.0, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "a",
        "\ud800",
        "\x1b]0;t\x07\x9b",
        "\0",
        "../x",
        "x" * 5000,
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"a": None},
        ["a", 1],
        [0] * 300,
        {"type": "Sequence"},
        {"content": ["a"]},
        "NFC",
        "yarn",
    ),
)
_REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
HOSTILE_NORMALIZERS: tuple[Any, ...] = (
    {"type": "Sequence", "normalizers": [_REPLACE] * 30},
    {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30},
    {"type": "Prepend", "prepend": "x" * 1_000_000},
    {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": "b" * 1000},
    {"type": "Replace", "pattern": {"String": ""}, "content": "b"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
)
HOSTILE_PRE_TOKENIZERS: tuple[Any, ...] = (
    {**_SPLIT, "pattern": {"Regex": "(a+)+$"}},
    {**_SPLIT, "pattern": {"Regex": "(?:(?:a?){500}){500}b"}},
    {**_SPLIT, "pattern": {"Regex": "(" * 3000 + ")" * 3000}},
    {**_SPLIT, "pattern": {"Regex": "(a{1,999}){1,999}"}},
    {**_SPLIT, "pattern": {"Regex": r"(.*)*\1{1,100}$"}},
    {**_SPLIT, "pattern": {"Regex": "["}},
    {
        "type": "Sequence",
        "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}] * 30,
    },
)
HOSTILE_TEMPLATES = (
    "{{ ('<'*10**7)|striptags }}",
    "{{ (10**9)**(10**7) }}",
    "{{ 'x' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ messages[0].content * 100000 }}",
    "{{ '%9999999999d' % 1 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('\x1b[2J\ud800\n') }}",
    "\ud800{{ messages[0].content }}",
    "{{" + "(" * 5000,
    "{{ messages | tojson(indent=10**9) }}",
    "<|im_end|>" * 20_000,
)

Files = dict[
    str, Any
]  # name -> parsed JSON, text or bytes; None is left out, a Callable makes something of its own


def _byte_level() -> Engine:
    tokens = [*byte_level_alphabet(), "th", "Ġth"]
    engine = Engine(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("t", "h"), ("Ġ", "th")]))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    engine.add_tokens([AddedToken("<think>")])
    engine.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", engine.token_to_id("<s>"))]
    )
    return engine


def _llama() -> Engine:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "H", "e"]
    vocab = {token: i for i, token in enumerate(tokens)}
    engine = Engine(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return engine


def _unigram() -> Engine:
    engine = Engine(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -1.5)], unk_id=0))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.add_special_tokens(["<unk>"])
    return engine


def _seed(
    folder: Path,
    architecture: str,
    engine: Engine,
    shards: int = 1,
    tied: bool = False,
    in_one_tensor: bool = False,
    width: int = 8,
    **more: Any,
) -> Files:
    """`in_one_tensor`: a layer's experts are. `width`: of the stream and of experts; of 32 they are packed."""
    tiny = {"blocks": 1, "embedding": width, "feed_forward": width, "heads": 2, "kv_heads": 1, "head_dim": 4}
    tiny |= {"blocks": 2, **DELTA} if architecture == "qwen35" else {}
    experts = 4 if more.get("model_type") == "mixtral" else None
    separate = architecture not in ("granitemoe", "gpt-oss")
    sizes = ModelSizes(architecture, **tiny, experts=experts, expert_feed_forward=width, separate=separate)
    config = {**hf_config(sizes, 270, tied), "eos_token_id": 1, **more}
    rename = partial(hf_name, architecture=more.get("model_type", architecture))
    weights = within_others(random_weights(sizes, 270, tied), architecture)
    write_hf(folder, config, weights, shards, rename)
    if in_one_tensor or width == 32:
        changed = (fused if in_one_tensor else packed)(load_file(folder / WEIGHTS))
        save_file(changed, folder / WEIGHTS)
    files: Files = {
        CONFIG: config,
        TOKENIZER: json.loads(engine.to_str()),
        TOKENIZER_CONFIG: {
            "bos_token": {"content": "<s>"},
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "model_max_length": 10**30,
            "chat_template": CHATML,
        },
        GENERATION: {"eos_token_id": [1, 2]},
    }
    files |= {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    if shards > 1:
        files[INDEX] = json.loads((folder / INDEX).read_text())
    return files


OTHERS: dict[str, dict[str, Any]] = {
    "olmo2": {"rope_theta": 5e5},
    "gemma3": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 2e4},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 4,
        "sliding_window_pattern": 2,
    },
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 4,
        "sliding_window": 8,
        "attn_logit_softcapping": 20.0,
    },
    "gemma4": {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 4,
        "layer_types": ["full_attention"],
        "final_logit_softcapping": 20.0,
    },
    "granite": {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
    },
    "phi3": {
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [4.0]},
    },
    "qwen2moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "qkv_bias": True},
    "glm4moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 8,
        "n_group": 2,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "ernie4_5-moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 8,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
    "dots1": {"n_shared_experts": 8, "n_group": 2, "attention_bias": False, "max_window_layers": 1},
    "minimax-m2": {"rotary_dim": 2},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 8},
    "arcee": {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    "hunyuan-dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "granitemoe": {"residual_multiplier": 0.22, "logits_scaling": 8},
    "gpt-oss": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "swiglu_limit": 7.0,
        "sliding_window": 8,
        "quantization_config": {"quant_method": "mxfp4"},
        "width": 32,
    },
    "qwen3moe": {"norm_topk_prob": True, "in_one_tensor": True},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False},
    "qwen35": {"mtp_num_hidden_layers": 1, "attn_output_gate": True},
}
"""Other architectures, with keys of their own."""


_TINY = {
    "vocab_size": 270,
    "max_position_embeddings": 128,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DECLARED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 260,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0],
        "intermediate_size": [8, 16],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 270,
        "use_double_wide_mlp": True,
    },
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
    "mistral4": {**_LATENT, "head_dim": 8},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 2,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    },
}
"""Model types -> keys of folders whose tensors have the names and shapes that are read of them."""


class _Wanted:
    """Notes what is read, in place of a folder's files."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        self.shapes[name] = shape
        return StoredTensor(name, "F32", shape)


def _declared(folder: Path, model_type: str, keys: dict[str, Any]) -> Files:
    config, wanted = {**_TINY, "model_type": model_type, **keys}, _Wanted()
    HFTensors(wanted, read_hf_config(config))  # type: ignore[arg-type]
    folder.mkdir()
    rng = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=rng) for name, shape in wanted.shapes.items()}
    save_file(weights, folder / WEIGHTS)
    return {
        CONFIG: config,
        TOKENIZER: json.loads(_llama().to_str()),
        TOKENIZER_CONFIG: {"bos_token": "<s>", "eos_token": "</s>"},
        WEIGHTS: (folder / WEIGHTS).read_bytes(),
    }


def seeds(folder: Path) -> list[Files]:
    """Whole folders: each architecture, kind of tokenizer and of rotary scaling, one file of weights and two."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 16}
    linear = {"type": "linear", "factor": 2.0}
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x"}]
    found = [
        _seed(folder / "a", "llama", _llama(), rope_scaling=llama3),
        _seed(folder / "b", "qwen2", _byte_level(), rope_scaling=yarn, tied=True),
        _seed(folder / "c", "qwen3", _byte_level(), shards=2, layer_types=["full_attention"]),
        _seed(folder / "d", "llama", _unigram(), rope_scaling=linear, model_type="mistral", sliding_window=8),
    ]
    found.append(_seed(folder / "e", "llama", _llama(), model_type="mixtral"))
    found += [_seed(folder / name, name, _llama(), **keys) for name, keys in OTHERS.items()]
    found += [_declared(folder / f"of {name}", name, keys) for name, keys in DECLARED.items()]
    found[1][TOKENIZER_CONFIG]["chat_template"] = named
    found[2][TEMPLATE] = CHATML
    return found


def write_convertible(folder: Path) -> Path:
    """A small folder of Qwen3 whose text is split as GPT-2's, so that a GGUF file can say how."""
    with tempfile.TemporaryDirectory() as scratch:
        files = seeds(Path(scratch))[2]
    files[TOKENIZER]["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    write_files(folder, files)
    return folder


class Mutator:
    """Turns a case number into a damaged folder.

    Most damage is a value exchanged somewhere within a JSON file, which then is written as it must be; the rest is
    done to bytes and files, or puts in what is known to be hostile.
    """

    def __init__(self, scratch: Path) -> None:
        self.seeds = seeds(scratch)

    def write(self, number: int, folder: Path) -> None:
        """Makes case `number` in `folder`, which must be empty."""
        rng = random.Random(number)
        files = copy.deepcopy(rng.choice(self.seeds))
        ways = (_exchange, _exchange, _exchange, _exchange, _drop, _hostile, _header, _file)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            rng.choice(ways)(rng, files)
        write_files(folder, files)
        if rng.random() < 0.15:
            _damage_bytes(rng, folder)


def write_files(folder: Path, files: Files) -> None:
    """Writes a folder's files."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_bytes(content.encode("utf-8", "surrogatepass"))
        elif content is not None:
            path.write_text(_json(content))


def _json(value: Any) -> str:
    # Of numbers longer than Python likes to write, only the text is needed.
    return json.dumps(value, default=str).replace('"<huge>"', "9" * 5000)


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value within `value`, of long arrays and objects only some."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    found = [(value, key) for key in keys[:8] + keys[-8:]]
    return found + [spot for key in keys[:8] + keys[-8:] for spot in _spots(value[key])]


def _exchange(rng: random.Random, files: Files) -> None:
    """Puts another value somewhere: an odd one, or one from elsewhere in the file."""
    name = rng.choice([n for n, content in files.items() if isinstance(content, dict)] or [None])
    if name is None or not (spots := _spots(files[name])):
        return
    container, key = rng.choice(spots)
    if rng.random() < 0.2:
        other, where = rng.choice(spots)
        value = copy.deepcopy(other[where]) if where in other or isinstance(other, list) else None
    else:
        value = rng.choice(ODD_VALUES)
    container[key] = "<huge>" if isinstance(value, int) and value > 10**1000 else value


def _drop(rng: random.Random, files: Files) -> None:
    """Takes a key or an element away, or gives an object one more."""
    name = rng.choice([n for n, content in files.items() if isinstance(content, dict)] or [None])
    if name is None or not (spots := _spots(files[name])):
        return
    container, key = rng.choice(spots)
    if isinstance(container, dict) and rng.random() < 0.3:
        container[rng.choice(("", "type", "content", "\x1b[2J", "id", "rope_type"))] = container[key]
    else:
        del container[key]


def _hostile(rng: random.Random, files: Files) -> None:
    way = rng.randrange(4)
    tokenizer = files.get(TOKENIZER)
    if way == 0:
        files[TEMPLATE] = rng.choice(HOSTILE_TEMPLATES)
    elif not isinstance(tokenizer, dict):
        return
    elif way == 1:
        tokenizer["normalizer"] = copy.deepcopy(rng.choice(HOSTILE_NORMALIZERS))
    elif way == 2:
        tokenizer["pre_tokenizer"] = copy.deepcopy(rng.choice(HOSTILE_PRE_TOKENIZERS))
    elif isinstance(tokenizer.get("model"), dict) and isinstance(tokenizer["model"].get("vocab"), dict):
        tokenizer["model"]["vocab"][rng.choice(("zz", "a", "", "\x1b"))] = rng.choice(
            (2**32 - 1, 2**24, 2**23, -1, 0)
        )


def _header(rng: random.Random, files: Files) -> None:
    """Exchanges a value in the header of a file of weights."""
    name = rng.choice([n for n in files if n.endswith(".safetensors")] or [None])
    if name is None or not isinstance(files[name], bytes):
        return
    (size,) = struct.unpack_from("<Q", files[name])
    with suppress(ValueError):  # damaged before so that it cannot be read again
        _change_header(rng, files, name, size)


def _change_header(rng: random.Random, files: Files, name: str, size: int) -> None:
    header, data = json.loads(files[name][8 : 8 + size]), files[name][8 + size :]
    box: Files = {"header": header}
    rng.choice((_exchange, _drop))(rng, box)
    raw = _json(box["header"]).encode()
    files[name] = struct.pack("<Q", len(raw)) + raw + data


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


_INSTEAD: tuple[Any, ...] = (
    None,
    "",
    "{",
    "[]",
    "null",
    "\ufeff{}",
    "[" * 100_000,
    '{"a":' * 5000,
    Path.mkdir,
    os.mkfifo,
    _loop,
)


def _file(rng: random.Random, files: Files) -> None:
    """Puts something else in a file's place: nothing, other JSON, a folder, a named pipe, a link to itself."""
    files[rng.choice(list(files))] = rng.choice(_INSTEAD)


def _damage_bytes(rng: random.Random, folder: Path) -> None:
    regular = sorted(path for path in folder.iterdir() if path.is_file())
    if not regular:
        return
    path = rng.choice(regular)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) + 1)
    way = rng.randrange(4)
    if way == 0:
        del data[at:]
    elif way == 1:
        data[at:at] = rng.choice(
            (b"NaN", b"-Infinity", b"1e999", b"\xff", b"\\ud800", b"\0", b'"', b",", b"9" * 5000)
        )
    elif way == 2 and data:
        data[at % len(data)] = rng.randrange(256)
    else:
        data[at : at + rng.choice((1, 8, 100))] = b""
    path.write_bytes(data)


def read_everything(folder: Path) -> str:
    """Opens, checks and describes the folder. Returns "ok", or what was refused and by which kind of error."""
    steps: dict[str, Callable[[Path], Any]] = {
        "weights": _read_weights,
        "summary": _read_summary,
        "tokenizer": _read_tokenizer,
        "chat": _read_chat,
    }
    refused = []
    for name, step in steps.items():
        try:
            step(folder)
        except EngineError as error:
            text = str(error)
            assert "\n" not in text and text.replace("\t", " ").isprintable() and len(text) < 2000, text
            refused.append(name)
    return " ".join(refused) or "ok"


def _read_weights(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.nbytes > 0 and checkpoint.weights > 0
    assert checkpoint.config.rotation(0).spec().factor > 0 and " ".join(checkpoint.notes).isprintable()
    for tensor in checkpoint.tensors.values():
        tensor.data.max()
    checkpoint.close()


def _read_summary(folder: Path) -> None:
    summary = summarize(folder)
    summary.groups()
    assert summary.parameters >= 0 and summary.weight_bytes >= 0


def _read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_hf(folder)
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text, bos=True, special=True))


def _read_chat(folder: Path) -> None:
    template = ChatTemplate.from_hf(folder)
    if template is not None:
        encode_chat(Tokenizer.from_hf(folder), template, MESSAGES)
