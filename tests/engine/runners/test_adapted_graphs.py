"""Captured steps of a model with LoRA adapters: one graph serves any mix of them, and gives what eager steps do.

Without a GPU a "graph" is the step itself, run again in Triton's interpreter.
"""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.lora.backend import AdaptedCuda
from quengine.kernels.sampling import sample
from quengine.kv_cache import KVCache
from quengine.loading.machine import _cuda_runner
from quengine.memory import adapted_step_bytes
from quengine.model_runner import ModelRunner
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.request.adapter_scales import Scales
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners import cuda_graphs, graph_keys, static_inputs
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_capture import CapturedStep, capture_step
from quengine.sampler import Sample, Sampler
from quengine.step_plan import SequenceRows, StepPlan, forward_batch
from tests.engine.runners.test_cuda_graphs import Again
from tests.engine.steps import decode, with_slots
from tests.gguf_builder import ModelSizes
from tests.models.adapters import random_adapters
from tests.tiny_models import write_tiny

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CTX = 96
IDS = ([3, 40], [5], [11, 200])
SCALES: tuple[Scales | None, ...] = ((1.0, 0.0), None, (0.0, -2.0))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    if not ON_GPU:
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(cuda_graphs, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(torch.cuda, "Event", MagicMock())
        for module in (graph_keys, static_inputs):
            monkeypatch.setattr(module, "PREFILL_ROWS", (8,))
    sizes = ModelSizes("qwen2", blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32)
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "qwen2", "Q8_0", sizes=sizes))
    stems = ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
    adapters = random_adapters(checkpoint.tensors, stems, (4, 3))
    backend = AdaptedCuda(adapters, DEVICE, batch_invariant=True)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CTX, CTX)
    cache = KVCache.allocate(checkpoint.config, CTX, DEVICE, pools=[CachePool(4)])

    def again(_warm: object, step: object, _pool: object) -> CapturedStep:
        logits = torch.empty(8, decoder.config.vocab_size)
        return CapturedStep(Again(step, logits), logits, 0)  # type: ignore[arg-type]

    graphs = CudaGraphs(decoder, cache, 4, capture=capture_step if ON_GPU else again)
    return ModelRunner(decoder, cache, graphs, DeviceDecoder(graphs), sample)


def chunks(ids: tuple[list[int], ...] = IDS) -> list[SequenceRows]:
    return [
        SequenceRows(part, 0, [[number + 1]], None, scales)
        for number, (part, scales) in enumerate(zip(ids, SCALES, strict=True))
    ]


def eagerly(runner: ModelRunner, ids: tuple[list[int], ...]) -> Tensor:
    """Logits after the last token of each of these texts."""
    batch = forward_batch("prefill", chunks(ids), DEVICE)
    return runner.decoder.forward(batch, runner.cache.layers).clone()


@pytest.mark.cuda_kernel
def test_prompts_with_different_adapters_in_one_captured_step(runner: ModelRunner) -> None:
    expected = eagerly(runner, IDS)
    for _ in range(2):  # eager, then captured
        assert torch.equal(runner.forward("prefill", chunks()), expected)
    assert runner.graphs is not None
    key = runner.graphs.lookup("prefill", chunks())
    assert key is not None and key.adapted
    without = [part._replace(adapters=None) for part in chunks()]
    plain = runner.forward("prefill", without)
    assert torch.equal(plain[1], expected[1]) and not torch.equal(plain[0], expected[0])


def test_a_layer_that_drafts_has_no_captured_steps_with_adapters(runner: ModelRunner) -> None:
    config, given = EngineConfig(lora=("a.gguf",)), (runner.decoder, runner.cache)
    for drafts in (False, True):
        made = _cuda_runner(config, *given, drafts=drafts, takes_images=False).graphs
        assert isinstance(made, CudaGraphs)
        assert {key.adapted for key in made.keys} == ({False} if drafts else {False, True})


def test_memory_is_planned_for_the_logits_of_captured_steps_with_adapters(runner: ModelRunner) -> None:
    graphs, config = runner.graphs, runner.decoder.config
    assert isinstance(graphs, CudaGraphs)
    kept = [key.rows if key.phase == "decode" else key.sequences for key in graphs.keys if key.adapted]
    planned = adapted_step_bytes(config, runner.decoder.chunk_size, graphs.rows)
    assert planned == 4 * sum(kept) * config.vocab_size > 0


@pytest.mark.cuda_kernel
def test_sequences_with_different_adapters_decode_in_one_graph(runner: ModelRunner) -> None:
    """Each in the slot of another at first, whose scales go with it."""
    texts = tuple(list(ids) for ids in IDS)
    params = SamplingParams(temperature=0, seed=1)
    sequences = list[Sequence]()
    for number, (ids, scales) in enumerate(zip(texts, SCALES, strict=True)):
        stream = TextStream(lambda _: b"", ())
        sampler = Sampler(params, runner.decoder.config.vocab_size, 0, None, sample)
        sequence = Sequence(list(ids), params, sampler, stream, frozenset(), CTX, adapters=scales)
        sequence.block_tables = ([number + 1],)
        sequences.append(sequence)
    with_slots(sequences)
    expected = eagerly(runner, texts).argmax(1).tolist()
    plan = runner.launch(StepPlan.prefill(sequences, chunks()))
    for step in range(2):
        results = plan.results() if step == 0 else decode(runner, sequences)
        tokens = [result.token for result in results if isinstance(result, Sample)]
        assert tokens == expected
        for sequence, text, token in zip(sequences, texts, tokens, strict=True):
            sequence.num_cached_tokens = len(text)
            sequence.token_ids.append(token)
            text.append(token)
        expected = eagerly(runner, texts).argmax(1).tolist()
    assert isinstance(runner.graphs, CudaGraphs)
    assert [key.adapted for key in runner.graphs.captured if key.phase == "decode"] == [True]
