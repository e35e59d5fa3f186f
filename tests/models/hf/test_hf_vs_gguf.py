"""One model written both ways, as a checkpoint folder and as GGUF, gives one set of logits, to the last bit."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from quengine import LLM, SamplingParams
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from tests.forward import forward
from tests.gguf_builder import GGUFBuilder, ModelSizes
from tests.hf_writer import hf_config, hf_name, in_gguf_order, random_weights, write_hf
from tests.tiny_models import chat_vocabulary

IDS = [5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1]
VOCAB = len(chat_vocabulary()["tokenizer.ggml.tokens"])
EPS = 2.0**-17  # GGUF keeps it in fp32, config.json in decimal: take one that is the same in both
DTYPES = {"F32": torch.float32, "F16": torch.float16}


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    """A prompt of eight tokens at once, then one token at a time: [T, vocab] fp64."""
    decoder = Decoder(checkpoint.config, checkpoint.tensors, ReferenceBackend(keep=True), 64, 8)
    cache = KVCache.allocate(checkpoint.config, 64, torch.device("cpu"))
    cuts = [0, 8, *range(9, len(IDS) + 1)]
    rows = [
        forward(decoder, IDS[start:end], cache.layers, start, all_logits=True)
        for start, end in pairwise(cuts)
    ]
    return torch.cat(rows)


def written_both_ways(
    folder: Path, sizes: ModelSizes, kind: str, tied: bool, hf: dict | None = None, gguf: dict | None = None
) -> tuple[Checkpoint, Checkpoint]:
    """The same weights as GGUF and as a checkpoint; vectors stay F32 in GGUF, as converters write them."""
    dtype = DTYPES[kind]
    weights = random_weights(sizes, VOCAB, tied, dtype)
    eps = {f"{sizes.architecture}.attention.layer_norm_rms_epsilon": EPS}
    metadata = sizes.metadata() | chat_vocabulary() | eps | (gguf or {})
    builder = GGUFBuilder().kvs(metadata)
    for name, values in in_gguf_order(weights, sizes).items():
        stored = kind if values.ndim > 1 else "F32"
        builder.tensor(name, tuple(values.shape), stored, values.to(DTYPES[stored]).numpy())
    path = builder.write(folder / "model.gguf")
    config = hf_config(sizes, VOCAB, tied, **{"rms_norm_eps": EPS, **(hf or {})})
    mixtral = config["model_type"] == "mixtral"
    rename = partial(hf_name, architecture="mixtral" if mixtral else sizes.architecture)
    return GGUFCheckpoint(path), HFCheckpoint(write_hf(folder / "hf", config, weights, 2, rename))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "olmo2", "phi3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_same_both_ways(tmp_path: Path, architecture: str, kind: str, tied: bool) -> None:
    gguf, hf = written_both_ways(tmp_path, ModelSizes(architecture=architecture), kind, tied)
    expected = logits_of(gguf)
    assert expected.abs().max() > 0.1
    assert torch.equal(logits_of(hf), expected)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe", "olmoe"])
def test_logits_of_experts_are_the_same_both_ways(tmp_path: Path, architecture: str, kind: str) -> None:
    sizes = ModelSizes(architecture, experts=4, separate=True)
    hf = {"model_type": "mixtral"} if architecture == "llama" else {}
    hf |= {"norm_topk_prob": architecture == "qwen3moe"}
    gguf, folder = written_both_ways(tmp_path, sizes, kind, False, hf)
    assert folder.config.experts == gguf.config.experts
    assert torch.equal(logits_of(folder), logits_of(gguf))


def test_a_mistral_folder_equals_a_llama_gguf_with_a_window(tmp_path: Path) -> None:
    gguf, hf = written_both_ways(
        tmp_path,
        ModelSizes(),
        "F32",
        False,
        hf={"model_type": "mistral", "sliding_window": 4, "rope_theta": 1e6},
        gguf={"llama.attention.sliding_window": 4, "llama.rope.freq_base": 1e6},
    )
    assert hf.config.sliding_window == gguf.config.sliding_window == 4
    assert torch.equal(logits_of(hf), logits_of(gguf))


def test_llama3_scaling_from_the_configuration_equals_rope_freqs_in_the_file(tmp_path: Path) -> None:
    sizes = ModelSizes(context=131072)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    weights = random_weights(sizes, VOCAB)
    hf = HFCheckpoint(write_hf(tmp_path / "hf", hf_config(sizes, VOCAB, rope_scaling=scaling), weights))
    factors = hf.config.rope_scaling.freq_factors
    assert factors is not None and max(factors) == 8.0
    builder = GGUFBuilder().kvs(sizes.metadata() | chat_vocabulary())
    for name, values in in_gguf_order(weights, sizes).items():
        builder.tensor(name, tuple(values.shape), "F32", values.numpy())
    builder.tensor("rope_freqs.weight", (len(factors),), "F32", torch.tensor(factors).numpy())
    gguf = GGUFCheckpoint(builder.write(tmp_path / "model.gguf"))
    assert torch.allclose(logits_of(hf), logits_of(gguf), rtol=0, atol=1e-5)  # rope_freqs is fp32 in the file


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_order_of_query_rows_matters(tmp_path: Path, architecture: str) -> None:
    """A control: were Q left as it is (or permuted where it must not be), the comparison above would say so."""
    gguf, hf = written_both_ways(tmp_path, ModelSizes(architecture=architecture), "F32", False)
    assert isinstance(hf, HFCheckpoint)
    name = "blk.0.attn_q.weight"
    if architecture == "llama":
        del hf.tensors.heads[name]
    else:
        hf.tensors.heads[name] = (4, 16)
    assert (logits_of(hf) - logits_of(gguf)).abs().max() > 1e-3


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the vocabulary that the GGUF file has in its metadata."""
    vocabulary = chat_vocabulary()
    texts = vocabulary["tokenizer.ggml.tokens"]
    special = [t for t, kind in zip(texts, vocabulary["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    ids = {text: i for i, text in enumerate(texts) if text not in special}
    merges = [tuple(merge.split(" ")) for merge in vocabulary["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": texts[-1], "chat_template": vocabulary["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_whole_engine_answers_the_same_from_a_folder(tmp_path: Path, backend: str) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128)
    gguf, hf = written_both_ways(tmp_path, sizes, "F16", tied=False)
    write_tokenizer(hf.path)
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=3)
    messages = [{"role": "user", "content": "the cat <|im_end|> sat"}]
    answers = []
    for path in (gguf.path, hf.path):
        with LLM(path, device="cpu", threads=1, backend=backend) as llm:
            prompt = llm.encode_chat(messages)
            answers.append((prompt, llm.chat(messages, params).tokens, llm.tokenizer.eos_ids))
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == 16
