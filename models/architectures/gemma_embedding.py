"""EmbeddingGemma: Gemma 3's layers with attention to both sides, and matrices that multiply the pooled vector.

Layers with a window W see the positions at most W // 2 away. Folders are Gemma 3's with `use_bidirectional_attention`,
whose matrices for the pooled vector are modules of sentence-transformers. Source: Vera et al. 2025, "EmbeddingGemma";
`Gemma3TextModel` in the `transformers` library; llama.cpp's converter for the names of GGUF files.
"""

from collections.abc import Mapping
from dataclasses import replace

from quengine.models.architectures.architecture import Architecture, Fields, Keys
from quengine.models.architectures.bert import CAUSAL
from quengine.models.architectures.gemma3 import GEMMA3, LOCAL, PERIOD, TEXT, full_attention_layers
from quengine.models.architectures.windows import LOCAL_BASE, PATTERN, gguf_fields
from quengine.models.blocks.block import NORM, Draw, TensorSpec
from quengine.models.blocks.encoder import bidirectional_layers
from quengine.models.config import PROJECTIONS, EncoderSizes, ModelConfig
from quengine.models.gguf import GGUFFile

_FEATURES = tuple(f"{name}_feat_{end}" for name in PROJECTIONS for end in ("in", "out"))
_SIZES = EncoderSizes(token_types=0, biases=False, rotates=True)


def _tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    width, sizes = config.embedding_length, config.encoder
    assert sizes is not None
    table = TensorSpec(
        (config.vocab_size, width), hf="{body}embed_tokens.weight", draw=Draw(by_columns=False)
    )
    found = {"token_embd.weight": table}
    for name, (columns, rows) in zip(PROJECTIONS, sizes.projections, strict=False):
        found[f"{name}.weight"] = TensorSpec((rows, columns), hf=f"{name}.linear.weight")
    return {**found, "output_norm.weight": TensorSpec((width,), hf="{body}norm.weight", draw=NORM)}


def _common_keys(keys: Keys) -> Keys:
    both = "use_bidirectional_attention"
    return TEXT.common_keys({key: value for key, value in keys.items() if key != both})


def _fields(keys: Keys, config: ModelConfig) -> Fields:
    return {**TEXT.fields(keys, config), "encoder": _SIZES}


def _size_fields(config: ModelConfig) -> Fields:
    window = config.sliding_window or 512
    return {
        **GEMMA3.size_fields(config),
        "attention_scale": config.head_dim**-0.5,
        "sliding_window": window,
        "full_attention_layers": full_attention_layers(config.block_count),
        "rope_freq_base_swa": LOCAL,
        "encoder": _SIZES,
        "tied_output": True,
    }


def _gguf_fields(file: GGUFFile, config: ModelConfig) -> Fields:
    a = config.architecture
    if file.get_bool(f"{a}.{CAUSAL}"):
        raise file.error(f"{a}.{CAUSAL}", "true: positions see each other in a model of this kind")
    if not file.get_int(f"{a}.attention.sliding_window"):
        raise file.error(f"{a}.attention.sliding_window", "missing: layers of this model have one")
    sizes = replace(_SIZES, projections=_projections(file, config))
    return {**gguf_fields(file, config, PERIOD, LOCAL), "encoder": sizes}


def _projections(file: GGUFFile, config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of a file's matrices for the pooled vector. Raises GGUFError where one does not fit the next."""
    found: list[tuple[int, int]] = []
    for name in PROJECTIONS:
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None or len(tensor.shape) != 2:
            break
        rows, columns = tensor.shape
        for end, size in (("in", columns), ("out", rows)):
            key = f"{config.architecture}.{name}_feat_{end}"
            if file.get_int(key) not in (None, size):
                raise file.error(key, f"{file.get_int(key)}: {name}.weight has {size}")
        found.append((columns, rows))
    if problem := EncoderSizes.problem_of(tuple(found), config.embedding_length):
        raise file.tensor_error(f"{PROJECTIONS[0]}.weight", problem)
    return tuple(found)


GEMMA_EMBEDDING = Architecture(
    name="gemma-embedding",
    model_types={},
    bidirectional_types={"gemma3_text": replace(TEXT, common_keys=_common_keys, fields=_fields)},
    block=GEMMA3.block,
    build=bidirectional_layers,
    top_tensors=_tensors,
    projects=True,
    hf_modules=GEMMA3.hf_modules,
    hf_norm_offset=GEMMA3.hf_norm_offset,
    vocabulary="spm",
    size_fields=_size_fields,
    gguf_keys=(CAUSAL, PATTERN, LOCAL_BASE, *_FEATURES),
    gguf_fields=_gguf_fields,
    synthetic={
        "embeddinggemma-300m": {
            "vocab_size": 262144,
            "context_length": 2048,
            "embedding_length": 768,
            "block_count": 24,
            "feed_forward_length": 1152,
            "head_count": 3,
            "head_count_kv": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "tied_output": True,
        },
        "embeddinggemma-tiny": {"block_count": 7, "sliding_window": 16, "tied_output": True},
    },
)
