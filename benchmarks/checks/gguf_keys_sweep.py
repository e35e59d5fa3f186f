"""Changes each key of tiny GGUF files, one at a time, and compares the logits with llama.cpp's.

    python -m benchmarks.checks.gguf_keys_sweep [--jobs 16] [--architectures gemma3 olmo2 ...] [--every 1]

Run from the repository root. Files have random weights in F32, so that llama.cpp rounds little but its cache. Prints a
line for each architecture: changes that give the same logits, that one side or the other refuses, that were decided
otherwise (DECIDED says why), and those that are silently other, which follow one by one. One JSON line ends the report;
exits with 1 if any was silently other or ended a process.

The peer is the library within the package xllamacpp (pip install xllamacpp), called by the functions of llama.h.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quengine.errors import EngineError
from quengine.models.architectures import ARCHITECTURES
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.gguf_builder import MAMBAS, SUMMED, ModelSizes, spm_vocabulary
from tests.llama_cpp_logits import llama_cpp_logits
from tests.llama_cpp_vocab import library
from tests.tiny_models import chat_vocabulary, write_tiny
from tests.transformers_models import our_logits

COLUMNS = ("equal", "refused here", "refused there", "decided", "other", "failed")
TOLERANCE = 1e-3
"""Largest error of logits that count as equal: llama.cpp's fp16 cache and fast exponentials make up to 1e-5, a key that
counts more."""

_PLAIN = "|".join(
    (
        *("seed_oss", "glm4", "granite", "llama", "qwen2", "qwen3", "ernie4_5", "hunyuan-dense", "openelm"),
        *("qwen2vl", "qwen3vl", "glm4moe", "granitemoe", "olmoe", "qwen2moe", "qwen3moe", "qwen3vlmoe"),
        *("ernie4_5-moe", "hunyuan-moe", "dots1", "bailingmoe2", "minimax-m2", "arcee", "llama4"),
    )
)
_NO_WINDOWS = f"{_PLAIN}|mistral3|phi3"
_YARN = f"{_PLAIN}|cohere2|gpt-oss|qwen35|qwen35moe|qwen3next"
_MIXTURES = "|".join(
    (
        *(
            "ernie4_5-moe",
            "hunyuan-moe",
            "qwen3vlmoe",
            "gpt-oss",
            "granitemoe",
            "olmoe",
            "qwen2moe",
            "qwen3moe",
        ),
        *("qwen35moe", "qwen3next", "llama4", "granitehybrid"),
    )
)
DECIDED: Mapping[str, str] = {
    rf"({_MIXTURES})\.expert_weights_scale = (0\.5|2\.0)": "llama.cpp's router is fixed for these",
    r"(olmoe|qwen2moe)\.expert_weights_norm = True": "llama.cpp's router is fixed for these",
    r"(ernie4_5-moe|hunyuan-moe|qwen3moe|qwen3vlmoe|qwen35moe|qwen3next)\.expert_weights_norm = False": (
        "llama.cpp's router is fixed for these"
    ),
    rf"({_MIXTURES})\.expert_gating_func = 2": "llama.cpp's router is fixed for these",
    r"minimax-m2\.(expert_weights_norm = False|expert_weights_scale = (0\.5|2\.0))": (
        "llama.cpp's router is fixed for these"
    ),
    r"nemotron_h_moe\.expert_gating_func = (1|3)": "llama.cpp's router is fixed for these",
    r"(granitemoe|granitehybrid|llama4)\.expert_gating_func = 1": "llama.cpp's router is fixed for these",
    r"llama4\.(expert_gating_func = 3|expert_weights_norm = True)": "llama.cpp's router is fixed for these",
    r"(ernie4_5-moe|olmoe|qwen2moe)\.expert_gating_func = 3": "llama.cpp's router is fixed for these",
    rf"({_NO_WINDOWS})\.attention\.sliding_window = (1|8)": "transformers has the window, llama.cpp not",
    r"olmo2\.rope\.freq_base_swa = (500\.0|1000000\.0)( with (linear|yarn))?": (
        "layers with a window have their own base, as in transformers"
    ),
    rf"({_YARN})\.rope\.scaling\.yarn_attn_factor = (0\.7|1\.5) with yarn": (
        "replaces YaRN's own, as attention_factor in transformers"
    ),
    r"mistral3\.rope\.scaling\.yarn_attn_factor = (0\.7|1\.5)( with yarn)?": (
        "replaces YaRN's own, as attention_factor in transformers"
    ),
    rf"({_YARN})\.rope\.scaling\.yarn_log_multiplier = (0\.1|1\.0) with yarn": (
        "read in few architectures by llama.cpp"
    ),
    rf"({_YARN})\.rope\.scaling\.yarn_beta_slow = 2\.0 with yarn": "read in few architectures by llama.cpp",
    r"gpt-oss\.rope\.scaling\.yarn_beta_fast = (8\.0|64\.0) with yarn": "read in few architectures by llama.cpp",
    r"gemma[34]\.rope\.scaling\.attn_factor = 1\.5( with (linear|yarn))?": (
        "belongs to the scaling, which windows have not"
    ),
    r"qwen2vl\.attention\.layer_norm_rms_epsilon = (0\.01|0\.5)": "llama.cpp has an epsilon of its own there",
    r"gpt-oss\.attention\.sliding_window = 0": "no window, as converters write it",
}
"""Pattern of a change -> why its meaning is another than llama.cpp's. A pattern has the keys and values that were
looked into, and no more."""

ROUNDED = "YaRN's limits are not rounded, as the model was trained: with rounded ones the logits are the same"
"""Why gpt-oss is other with YaRN, which `compare` makes sure of."""

MORE: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"attention.sliding_window": 5},
    "gemma3": {"attention.sliding_window": 5, "rope.freq_base_swa": 2e4},
    "gemma-embedding": {  # llama.cpp ends where no layer sees the whole text
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 2e4,
    },
    "modern-bert": {"attention.sliding_window": 5, "rope.freq_base_swa": 2e4, "hidden_activation": "gelu"},
    "gemma4": {"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0},
    "olmo2": {"attention.sliding_window": 5},
    "gpt-oss": {"attention.sliding_window": 5},
    "glm4moe": {
        "expert_shared_count": 2,
        "leading_dense_block_count": 0,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
    },
    "ernie4_5-moe": {
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": 0,
        "expert_shared_count": 2,
    },
    "dots1": {
        "expert_shared_count": 2,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    },
    "minimax-m2": {"expert_gating_func": 2},
    "deepseek2": {
        "expert_shared_count": 2,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    },
    "mistral4": {
        "expert_shared_count": 2,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 1,
    },
    "bailingmoe2": {
        "expert_shared_count": 1,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    },
    "qwen2vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "qwen3vl": {"rope.dimension_sections": [3, 3, 2, 0]},
    "qwen3vlmoe": {"rope.dimension_sections": [3, 3, 2, 0]},
    "granite": {"embedding_scale": 6.0, "residual_scale": 0.5, "attention.scale": 0.3, "logit_scale": 4.0},
    "granitemoe": {"embedding_scale": 6.0, "residual_scale": 0.5, "attention.scale": 0.3, "logit_scale": 4.0},
    "granitehybrid": {
        "embedding_scale": 6.0,
        "residual_scale": 0.5,
        "attention.scale": 0.3,
        "logit_scale": 4.0,
    },
    "nemotron_h_moe": {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_shared_count": 1},
    "lfm2moe": {"leading_dense_block_count": 0, "expert_gating_func": 2},
    "mistral3": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1,
    },
}
"""What the files of an architecture have besides the sizes."""

VALUES: Mapping[str, tuple[Any, ...]] = {
    "context_length": (64, 4096),
    "embedding_length": (32, 128),
    "block_count": (1, 3),
    "feed_forward_length": (48, 192),
    "attention.head_count": (2, 8),
    "attention.head_count_kv": (1, 4),
    "attention.key_length": (8, 32),
    "attention.value_length": (8, 32),
    "attention.layer_norm_rms_epsilon": (1e-6, 1e-2, 0.5),
    "attention.layer_norm_epsilon": (1e-6, 1e-2, 0.5),
    "attention.sliding_window": (0, 1, 8, 64),
    "attention.sliding_window_pattern": (1, 2, 6),
    "attention.scale": (0.0, 0.1, 1.0),
    "attention.output_scale": (0.5,),
    "attention.clamp_kqv": (1.0,),
    "attention.causal": (False, True),
    "attention.temperature_scale": (0.3,),
    "attention.temperature_length": (16,),
    "attention.key_length_swa": (8, 16),
    "attention.value_length_swa": (8, 16),
    "attention.shared_kv_layers": (1,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "logit_scale": (2.0,),
    "embedding_scale": (2.0,),
    "embedding_length_per_layer_input": (8,),
    "residual_scale": (0.5,),
    "rope.dimension_count": (8, 16),
    "rope.dimension_count_swa": (8, 16),
    "rope.freq_base": (500.0, 1e6),
    "rope.freq_base_swa": (500.0, 1e6),
    "rope.scale_linear": (2.0,),
    "rope.scaling.type": ("none", "linear", "yarn", "longrope"),
    "rope.scaling.factor": (2.0, 8.0),
    "rope.scaling.attn_factor": (1.5,),
    "rope.scaling.original_context_length": (16, 64),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_log_multiplier": (0.1, 1.0),
    "rope.scaling.yarn_ext_factor": (0.0, 0.5, 1.0),
    "rope.scaling.yarn_attn_factor": (0.7, 1.5),
    "rope.scaling.yarn_beta_fast": (8.0, 64.0),
    "rope.scaling.yarn_beta_slow": (2.0,),
    "expert_count": (2, 4, 8),
    "expert_used_count": (1, 3, 4),
    "expert_feed_forward_length": (16, 64),
    "expert_shared_feed_forward_length": (32, 128),
    "expert_shared_count": (1, 2),
    "expert_weights_norm": (True, False),
    "expert_weights_scale": (0.5, 2.0),
    "expert_gating_func": (0, 1, 2, 3),
    "expert_group_count": (1, 2),
    "expert_group_used_count": (1, 2),
    "leading_dense_block_count": (1,),
    "nextn_predict_layers": (1,),
    "pooling_type": (0, 1, 3),
    "use_parallel_residual": (True,),
    "interleave_moe_layer_step": (2,),
    "moe_every_n_layers": (2,),
    "vocab_size": (17,),
    "hidden_activation": ("silu", "relu"),
}
"""Key after the architecture's prefix -> legal values to try, beside leaving it out."""

OF_MAMBA: Mapping[str, tuple[Any, ...]] = {
    "ssm.conv_kernel": (2,),
    "ssm.state_size": (8, 32),
    "ssm.group_count": (1, 2),
    "ssm.time_step_rank": (2, 8),
    "ssm.inner_size": (64, 256),
    "ssm.dt_b_c_rms": (True,),
    "attention.layer_norm_epsilon": (1e-2, 0.5),
    "moe_latent_size": (16,),
}
"""Key -> values to try, for architectures with Mamba2 layers."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "olmoe": {"kv_heads": 4},
    "dots1": {"kv_heads": 4},
    "minimax-m2": {"expert_feed_forward": 96},
    "hunyuan-moe": {"expert_feed_forward": 96},
    "llama4": {"blocks": 4},
}
"""Where llama.cpp takes fewer sizes than are usual here."""

SPM = ("phi3",)
"""Architectures that llama.cpp reads with a SentencePiece vocabulary alone."""

TIED = ("cohere2", "gemma2", "gemma4", "openelm")
"""Architectures whose output matrix is the embedding for llama.cpp."""

NOT_COMPARED = {"gemma3n"}
"""A model of which llama.cpp takes sizes, cutoffs and sharing layers for those of released files."""

WITH_SCALING = ("linear", "yarn")
"""Kinds of scaling that every key of a rotation is tried with too."""


def compare(path: Path, name: str, vocab: int) -> tuple[str, str]:
    """What became of a changed file, and how far the logits lie apart or what was said. Ends with the process."""
    try:
        file = GGUFCheckpoint(path)
        ours = our_logits(file, vocab)
    except EngineError as error:
        return "refused here", str(error)
    theirs = llama_cpp_logits(path, vocab, file.config.embedding_length if file.config.encoder else 0)
    if theirs is None or not np.isfinite(theirs).all():
        return "refused there", "not loaded, or no finite logits"
    difference = _difference(ours, theirs)
    if difference < TOLERANCE:
        return "equal", f"NMSE {difference:.1e}"
    for pattern, reason in DECIDED.items():
        if re.fullmatch(pattern, name):
            return "decided", reason
    if (
        name.startswith("gpt-oss.")
        and "yarn" in name
        and _difference(_rounded(file, vocab), theirs) < TOLERANCE
    ):
        return "decided", ROUNDED
    return "other", f"NMSE {difference:.1e}"


def _difference(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """The median position's NMSE: at some a router may tip between experts all but equal, by the cache's rounding."""
    signal = torch.from_numpy(theirs).double()
    return float(((ours - signal).square().sum(-1) / signal.square().sum(-1)).median())


def _rounded(file: GGUFCheckpoint, vocab: int) -> torch.Tensor:
    """Logits with YaRN's limits rounded, as llama.cpp does for every model."""
    scaling = replace(file.config.rope_scaling, truncate=True)
    file.config = replace(file.config, rope_scaling=scaling)
    return our_logits(file, vocab)


def changes(architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changed metadata (None: left out) of every change of an architecture's files."""
    more = {f"{architecture}.{key}": value for key, value in MORE.get(architecture, {}).items()}
    more["general.name"] = "tiny"  # by some names llama.cpp expects tokens of a released model
    if architecture in SUMMED:
        more["tokenizer.ggml.token_type_count"] = 2
    metadata = ModelSizes(architecture, **SIZES.get(architecture, {})).metadata() | more
    yield "as it is", more
    own = OF_MAMBA if architecture in MAMBAS else {}
    for suffix, values in {**VALUES, **own}.items():
        key = f"{architecture}.{suffix}"
        if key in metadata:
            yield f"without {key}", more | {key: None}
        for value in values:
            if metadata.get(key) != value:
                yield f"{key} = {value}", more | {key: value}
    scaling = f"{architecture}.rope.scaling"
    for kind in WITH_SCALING:
        base = {f"{scaling}.type": kind, f"{scaling}.factor": 4.0, f"{scaling}.original_context_length": 32}
        for suffix, values in VALUES.items():
            if suffix.startswith("rope.") and suffix != "rope.scaling.type":
                for value in values:
                    change = {f"{architecture}.{suffix}": value}
                    yield f"{architecture}.{suffix} = {value} with {kind}", more | base | change


def _in_a_process(architecture: str, name: str, change: Mapping[str, Any], scratch: Path) -> tuple[str, str]:
    """`compare` in a child, which an assertion of llama.cpp may end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            vocabulary = spm_vocabulary() if architecture in SPM else chat_vocabulary()
            path = write_tiny(
                scratch / f"{os.getpid()}.gguf",
                architecture,
                sizes=ModelSizes(architecture, **SIZES.get(architecture, {})),
                changes=change,
                vocabulary=vocabulary,
                tied=architecture in TIED,
            )
            found = compare(path, name, len(vocabulary["tokenizer.ggml.tokens"]))
            path.unlink()
        except Exception as error:
            found = "failed", f"{type(error).__name__}: {error}"[:300]
        os.write(writer, json.dumps(found).encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    outcome, said = json.loads(answer) if answer else ("refused there", "its process ended")
    return outcome, said


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--architectures", nargs="*", default=sorted(set(ARCHITECTURES) - NOT_COMPARED))
    parser.add_argument("--every", type=int, default=1, help="only every so many changes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    library()
    began, total = time.monotonic(), Counter[str]()
    print(f"{'':12}{'changes':>8}" + "".join(f"{column:>15}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        for architecture in options.architectures:
            chosen = list(changes(architecture))[:: options.every]
            parts = [pool.submit(_in_a_process, architecture, *change, Path(scratch)) for change in chosen]
            found = [(name, *part.result()) for (name, _), part in zip(chosen, parts, strict=True)]
            counts = Counter(outcome for _, outcome, _ in found)
            total += counts
            line = f"{architecture:12}{len(found):8}" + "".join(f"{counts[column]:15}" for column in COLUMNS)
            print(line, flush=True)
            for name, outcome, said in found:
                if outcome in ("decided", "other", "failed"):
                    print(f"    {outcome}: {name}: {said}")
    print(json.dumps({"changes": total.total(), **total, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if total["other"] or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
