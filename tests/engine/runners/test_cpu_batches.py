"""Batches of sequences on the CPU: a sequence's logits have the bits that they have alone, in a contiguous cache."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from quengine import LLM
from quengine.block_pool import CachePool
from quengine.errors import EngineError
from quengine.kernels import cpu
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType
from quengine.kv_cache import KVCache
from quengine.model_runner import ModelRunner
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners.cpu_steps import CpuSteps
from quengine.sampler import Sample
from quengine.step_plan import SequenceRows, StepPlan
from tests.engine.steps import decode
from tests.gguf_builder import GGUFBuilder, ModelSizes
from tests.tiny_models import chat_vocabulary, random_weights, write_tiny

CTX, STEPS = 320, 4
LENGTHS = (1, 2, 31, 32, 33, 70, 258, 300)  # of prompts; attention splits the keys of two
KINDS = {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "Q8_0"}
KINDS |= {"ffn_up": "Q4_1", "ffn_down": "Q5_0", "output": "F32", "token_embd": "Q4_1"}


@pytest.fixture(autouse=True)
def all_threads_afterwards() -> Iterator[None]:
    yield
    cpu.set_threads(cpu.max_threads())


@dataclass
class Listener:
    """Stands for a sampler: keeps the logits, and takes the likeliest token."""

    heard: list[Tensor] = field(default_factory=list)
    constraint: None = None

    def sample(self, logits: Tensor, history: list[int], position: int) -> Sample:
        assert len(history) == position
        self.heard.append(logits.clone())
        if not logits.isfinite().all():
            raise EngineError("not finite")
        return Sample(int(logits.argmax()))


def write_mixed(path: Path, **metadata: Any) -> Path:
    """Three query heads a key/value head, and matrices of as many types as a layer has."""
    sizes = ModelSizes(embedding=96, feed_forward=160, heads=9, kv_heads=3, head_dim=32, context=CTX)
    vocabulary = chat_vocabulary()
    builder = GGUFBuilder().kvs({**sizes.metadata(), **vocabulary, **metadata})
    for name, values in random_weights(sizes, len(vocabulary["tokenizer.ggml.tokens"]), False, 5).items():
        stored = KINDS[name.removesuffix(".weight").split(".")[-1]] if values.ndim > 1 else "F32"
        builder.tensor(name, values.shape, stored, quantize(values, GGMLQuantizationType[stored]))
    return builder.write(path)


def write_model(path: Path, name: str) -> Path:
    if name == "mixed":
        return write_mixed(path)
    if name == "window":
        return write_mixed(path, **{"llama.attention.sliding_window": 50})
    sizes = ModelSizes("qwen3", embedding=256, feed_forward=256, head_dim=64, blocks=1, context=CTX)
    return write_tiny(path, "qwen3", "Q8_0", sizes=sizes, seed=3)


class Rig:
    """A tiny model with runners over caches of its own."""

    def __init__(self, path: Path, cache_type: CacheType = "f16", threads: int = 1) -> None:
        checkpoint = GGUFCheckpoint(path)
        self.backend = CpuBackend(threads)
        self.decoder = Decoder(checkpoint.config, checkpoint.tensors, self.backend, CTX, CTX)
        self.cache_type = cache_type

    def runner(self, num_blocks: int | None = None) -> ModelRunner:
        config, device = self.decoder.config, torch.device("cpu")
        pools = None if num_blocks is None else [CachePool(num_blocks)]
        cache = KVCache.allocate(config, CTX, device, self.cache_type, pools)
        for tensor in (tensor for layer in cache.layers for tensor in layer.tensors):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        return ModelRunner(self.decoder, cache, CpuSteps(self.decoder, cache))

    def sequences(self, lengths: tuple[int, ...]) -> list[Sequence]:
        stream = TextStream(lambda _: b"", ())
        return [
            Sequence(
                [(n * i + 7) % 250 for i in range(n)],
                *(SamplingParams(), Listener(), stream, frozenset(), CTX),  # type: ignore[arg-type]
            )
            for n in lengths
        ]

    def alone(self, sequence: Sequence) -> list[Tensor]:
        """Logits behind the prompt and each of the tokens after it, over a cache of its own."""
        runner, ids = self.runner(), list(sequence.token_ids)
        tables = runner.cache.whole_tables
        if len(ids) > 1:
            first = runner.forward("prefill", [SequenceRows(ids, 0, tables)])
        else:
            first = runner.logits(ids, 0, "decode")
        logits = [first[-1]]
        for _ in range(STEPS):
            ids.append(int(logits[-1].argmax()))
            logits.append(runner.logits(ids[-1:], len(ids) - 1, "decode")[0])
        return logits


def take(sequence: Sequence, sample: Any) -> None:
    """What the engine does with a result."""
    assert isinstance(sample, Sample)
    sequence.token_ids.append(sample.token)


def place(sequences: list[Sequence], num_blocks: int) -> None:
    free = random.Random(3).sample(range(1, num_blocks + 1), num_blocks)
    for sequence in sequences:
        needed = -(-(len(sequence.token_ids) + STEPS) // BLOCK_SIZE)
        sequence.block_tables = ([free.pop() for _ in range(needed)],)


def prefill(runner: ModelRunner, sequence: Sequence, chunk: int) -> None:
    ids = list(sequence.token_ids)
    for start in range(0, len(ids), chunk):
        (sample,) = prompt_step(runner, sequence, ids[start : start + chunk], start)
        sequence.num_cached_tokens = min(len(ids), start + chunk)
    take(sequence, sample)


def prompt_step(runner: ModelRunner, sequence: Sequence, ids: list[int], start: int) -> list[Any]:
    if len(sequence.token_ids) == 1:  # a prompt of one token is a decode step
        return decode(runner, [sequence])
    chunk = SequenceRows(ids, start, sequence.block_tables)
    return runner.launch(StepPlan.prefill([sequence], [chunk])).results()


def step(runner: ModelRunner, sequences: list[Sequence]) -> None:
    for sequence, result in zip(sequences, decode(runner, sequences), strict=True):
        sequence.num_cached_tokens += 1
        take(sequence, result)


def heard(sequence: Sequence) -> Tensor:
    assert isinstance(sequence.sampler, Listener)
    return torch.stack(sequence.sampler.heard)


@pytest.mark.parametrize(
    ("model", "cache_type"),
    [("mixed", "f16"), ("mixed", "q8_0"), ("window", "q8_0"), ("qwen3", "f16"), ("mixed", "q4_0")],
)
def test_logits_in_batches_are_those_of_each_sequence_alone(
    tmp_path: Path, model: str, cache_type: CacheType
) -> None:
    path = write_model(tmp_path / "m.gguf", model)
    for threads in {1, cpu.max_threads()}:
        rig = Rig(path, cache_type, threads)
        sequences = rig.sequences(LENGTHS)
        expected = [torch.stack(rig.alone(sequence)) for sequence in sequences]
        runner = rig.runner(num_blocks=40)
        place(sequences, 40)
        for sequence, chunk in zip(sequences, (9, 1, 30, 32, 8, 69, 100, 256), strict=True):
            prefill(runner, sequence, chunk)
        # Batches of all, of some in another order, of one, of the rest.
        for batch in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 2, 5], [1], [7, 4, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]):
            step(runner, [sequences[i] for i in batch])
        for sequence in sequences:
            if len(heard(sequence)) <= STEPS:
                step(runner, [sequence])
        for sequence, logits in zip(sequences, expected, strict=True):
            assert torch.equal(heard(sequence), logits)


def test_rows_that_fill_a_step_up_change_nothing_and_nothing_changes_them(tmp_path: Path) -> None:
    rig = Rig(write_model(tmp_path / "m.gguf", "mixed"))
    sequences = rig.sequences((33, *range(1, 19)))
    expected = torch.stack(rig.alone(sequences[0]))
    runner = rig.runner(num_blocks=30)
    place(sequences, 30)
    for sequence in sequences:
        prefill(runner, sequence, 512)
    owned = [i for sequence in sequences for i in sequence.block_tables[0]]
    unowned = [i for i in range(1, 31) if i not in owned]
    for _ in range(STEPS):
        step(runner, sequences)  # 19 rows: a step of 20
    assert torch.equal(heard(sequences[0]), expected)
    for layer in runner.cache.layers:
        blocks = layer.k.unflatten(0, (-1, BLOCK_SIZE))
        assert blocks[unowned].isnan().all()
        spare = blocks[PADDING_BLOCK]
        assert spare[0].isfinite().all() and spare[1:].isnan().all()


def test_a_row_fails_alone_and_a_replayed_token_samples_nothing(tmp_path: Path) -> None:
    rig = Rig(write_model(tmp_path / "m.gguf", "mixed"))
    sequences = rig.sequences((5, 40, 7))
    expected = torch.stack(rig.alone(sequences[1]))
    runner = rig.runner(num_blocks=8)
    place(sequences, 8)
    for sequence in sequences:
        prefill(runner, sequence, 512)
    for layer in runner.cache.layers:
        layer.k[sequences[0].block_tables[0][0] * BLOCK_SIZE] = float("nan")
    sequences[2].token_ids += [3, 4]  # more that was generated, and is to be computed again
    results = decode(runner, sequences)
    assert isinstance(results[0], EngineError) and results[2] is None
    assert isinstance(results[1], Sample) and results[1].token == int(expected[1].argmax())
    assert torch.equal(heard(sequences[1]), expected[:2])


def test_eager_and_compiled_batches_have_the_same_bits(tmp_path: Path) -> None:
    rig = Rig(write_model(tmp_path / "m.gguf", "window"))
    sequences = rig.sequences((33, 5, 70))
    runner = rig.runner(num_blocks=10)
    place(sequences, 10)
    for sequence in sequences:
        prefill(runner, sequence, 512)
    batch = decode_batch(
        [s.token_ids[-1] for s in sequences],
        [s.num_cached_tokens for s in sequences],
        [s.block_tables for s in sequences],
        torch.device("cpu"),
    )
    with torch.no_grad():
        eager = rig.decoder.forward(batch, runner.cache.layers)
    step(runner, sequences)
    assert torch.equal(torch.stack([heard(sequence)[-1] for sequence in sequences]), eager)


@pytest.mark.parametrize("chunk", [7, 512])
def test_texts_at_once_are_the_texts_alone(tmp_path: Path, chunk: int) -> None:
    path = write_mixed(tmp_path / "m.gguf", **{"llama.attention.sliding_window": 50})
    prompts = [[(n * i + 7) % 250 for i in range(n)] for n in (40, 1, 3, 100, 33, 64, 17)]
    for params in (SamplingParams(max_tokens=20, temperature=0.0), SamplingParams(max_tokens=20, seed=5)):
        with LLM(path, "cpu", 160, 1, chunk_size=512) as llm:
            expected = [llm.generate(prompt, params)[0].tokens for prompt in prompts]
        with LLM(path, "cpu", 160, cpu.max_threads(), chunk_size=chunk, parallel=4) as llm:
            assert [completion.tokens for completion in llm.generate(prompts, params)] == expected
            assert [llm.generate(prompt, params)[0].tokens for prompt in prompts[:3]] == expected[:3]


def test_tokens_and_positions_out_of_range_are_refused(tmp_path: Path) -> None:
    rig = Rig(write_model(tmp_path / "m.gguf", "qwen3"))
    runner, vocabulary = rig.runner(num_blocks=10), rig.decoder.config.vocab_size
    (sequence,) = rig.sequences((1,))
    sequence.block_tables = (list(range(1, 11)),)
    for ids, match in [([vocabulary], "the embedding has rows"), ([0] * (CTX + 1), f"a cache of {CTX}")]:
        sequence.token_ids, sequence.num_cached_tokens = ids, len(ids) - 1
        with pytest.raises(ValueError, match=match):
            decode(runner, [sequence])
