"""The step lists of the CPU against the eager path, and which backends have them."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from quengine.config import EngineConfig
from quengine.kernels import cpu
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.load import load_model
from quengine.model_runner import ModelRunner
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.runners.cpu_steps import CpuSteps
from quengine.step_plan import SequenceRows
from tests.gguf_builder import GGUFBuilder, ModelSizes
from tests.kernels.weights import nmse
from tests.tiny_models import chat_vocabulary, random_weights, write_tiny

IDS = [5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1]
CTX = 600


@pytest.fixture(autouse=True)
def all_threads_afterwards() -> Iterator[None]:
    yield
    cpu.set_threads(cpu.max_threads())


def decoder_of(checkpoint: GGUFCheckpoint, backend: Any, **changes: Any) -> Decoder:
    config: ModelConfig = dataclasses.replace(checkpoint.config, **changes)
    return Decoder(config, checkpoint.tensors, backend, CTX, CTX)


def runner_of(decoder: Decoder, compiled: bool = True) -> ModelRunner:
    cache = KVCache.allocate(decoder.config, CTX, torch.device("cpu"))
    return ModelRunner(decoder, cache, CpuSteps(decoder, cache) if compiled else None)


def assert_same(path: Path, ids: list[int], **changes: Any) -> None:
    """Compiled and eager steps give equal bits on one thread and on all, near the definition."""
    checkpoint = GGUFCheckpoint(path)
    logits = []
    for threads in (1, cpu.max_threads()):
        decoder = decoder_of(checkpoint, CpuBackend(threads), **changes)
        for compiled in (False, True):
            runner = runner_of(decoder, compiled)
            logits.append(torch.cat([runner.logits([token], i, "decode") for i, token in enumerate(ids)]))
            assert all(layer.k[: len(ids)].isfinite().all() for layer in runner.cache.layers)
    for other in logits[1:]:
        assert torch.equal(other, logits[0])
    reference = runner_of(decoder_of(checkpoint, ReferenceBackend(keep=True), **changes), compiled=False)
    assert nmse(logits[0], reference.logits(ids, 0, "prefill")) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_decodes_to_the_bits_of_the_eager_path(
    tmp_path: Path, architecture: str, kind: str, tied: bool
) -> None:
    assert_same(write_tiny(tmp_path / "m.gguf", architecture, kind, tied=tied, seed=3), IDS)


@pytest.mark.parametrize("architecture", ["arcee", "cohere2", "llama4"])
def test_other_forms_of_blocks_do_too(tmp_path: Path, architecture: str) -> None:
    """No gate; LayerNorm, and a feed-forward beside attention; experts that weigh their input."""
    assert_same(write_tiny(tmp_path / "m.gguf", architecture, "Q8_0", tied=True, seed=3), IDS)


def test_a_step_sees_what_its_window_holds(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0", changes={"llama.attention.sliding_window": 4})
    assert_same(path, IDS)


def test_positions_beyond_one_kv_split_of_attention_are_seen(tmp_path: Path) -> None:
    sizes = ModelSizes(blocks=1, context=CTX)
    ids = [(7 * i) % 250 for i in range(530)]
    assert_same(write_tiny(tmp_path / "a.gguf", kind="Q8_0", sizes=sizes), ids)
    window = {"llama.attention.sliding_window": 300}
    assert_same(write_tiny(tmp_path / "b.gguf", kind="Q8_0", sizes=sizes, changes=window), ids)


def test_queries_are_scaled_by_position(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0")
    assert_same(path, IDS, attention_temperature_scale=0.5, attention_temperature_length=4)


def test_tensor_types_may_differ_within_a_layer(tmp_path: Path) -> None:
    # Q, K and V, and gate and up, are one operation each; a feed-forward of 80 is no multiple of 32 for an F16 down.
    sizes = ModelSizes(embedding=64, feed_forward=80)
    kinds = {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "Q8_0"}
    kinds |= {"ffn_up": "Q4_1", "ffn_down": "F16", "output": "F32", "token_embd": "Q5_0"}
    vocabulary = chat_vocabulary()
    builder = GGUFBuilder().kvs({**sizes.metadata(), **vocabulary})
    for name, values in random_weights(sizes, len(vocabulary["tokenizer.ggml.tokens"]), False, 5).items():
        stored = kinds[name.removesuffix(".weight").split(".")[-1]] if values.ndim > 1 else "F32"
        builder.tensor(name, values.shape, stored, quantize(values, GGMLQuantizationType[stored]))
    assert_same(builder.write(tmp_path / "m.gguf"), IDS)


def test_prompt_chunks_and_compiled_steps_share_the_cache(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "qwen3", "Q8_0"))
    decoder = decoder_of(checkpoint, CpuBackend(1))
    stepped, mixed = (runner_of(decoder) for _ in range(2))
    for i, token in enumerate(IDS):
        expected = stepped.logits([token], i, "decode")
    mixed.logits(IDS[:5], 0, "prefill")
    mixed.logits(IDS[5:6], 5, "decode")
    mixed.logits(IDS[6:10], 6, "prefill")
    assert nmse(mixed.logits(IDS[10:], 10, "decode"), expected) < 1e-5


def test_logits_of_a_step_outlive_the_next_one(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf"))
    runner = runner_of(decoder_of(checkpoint, CpuBackend(1)))
    first = runner.logits(IDS[:1], 0, "decode")
    kept = first.clone()
    runner.logits(IDS[1:2], 1, "decode")
    assert torch.equal(first, kept)


def test_tokens_and_positions_out_of_range_are_refused(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf"))
    runner = runner_of(decoder_of(checkpoint, CpuBackend(1)))
    for token in (-1, checkpoint.config.vocab_size):
        with pytest.raises(ValueError, match="the embedding has rows 0 to"):
            runner.logits([token], 0, "decode")
    for position in (-1, CTX):
        with pytest.raises(ValueError, match=f"not in a cache of {CTX}"):
            runner.logits([0], position, "decode")


def test_only_the_cpu_backend_has_step_lists(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    assert isinstance(load_model(path, EngineConfig(device="cpu")).runner.graphs, CpuSteps)
    assert load_model(path, EngineConfig(device="cpu", backend="reference")).runner.graphs is None


def test_a_warm_up_makes_the_lists_of_all_numbers_of_sequences(tmp_path: Path) -> None:
    runner = load_model(write_tiny(tmp_path / "m.gguf"), EngineConfig(device="cpu", parallel=3)).runner
    assert isinstance(runner.graphs, CpuSteps)
    runner.warm_up()
    made = dict(runner.graphs._steps)
    assert sorted(key.rows for key, _ in made) == [1, 2, 3]
    tables = [[0]]
    for count in (1, 2, 3):
        runner.forward("decode", [SequenceRows([5], 0, tables)] * count)
    assert runner.graphs._steps == made
