"""Captured steps of a model whose experts are in host memory: the CPU's list follows each replay.

Without a GPU a "graph" is the step itself, run again in Triton's interpreter, beside the thread that runs the list.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.offload import replacing, split_experts
from quengine.kernels.offload.split_experts import SplitExperts
from quengine.kv_cache import KVCache
from quengine.model_runner import ModelRunner
from quengine.models.decoder import Decoder
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners import cuda_graphs
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_capture import CapturedStep, capture_step
from quengine.runners.graph_keys import GREEDY, GraphKey, decode_key
from quengine.sampler import Sample, Sampler
from quengine.step_plan import SequenceRows, StepPlan
from tests.engine.steps import decode, with_slots
from tests.kernels.cuda.moe.test_moe_decoder import model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Again:
    """A step, run again."""

    def __init__(self, step: Callable[[], Tensor], logits: Tensor) -> None:
        self.step, self.logits = step, logits

    def replay(self) -> None:
        self.logits.copy_(self.step())


class Rig:
    """A tiny model, with one expert of each layer on the device as well."""

    def __init__(self) -> None:
        config, tensors = model("dense layer first", "Q8_0")
        backend, experts = CudaBackend(DEVICE), config.experts
        assert experts is not None
        sizes = config.embedding_length, experts.router.used, experts.count
        self.experts = SplitExperts(backend, CpuBackend(2), config.block_count, 4, *sizes, 2)
        decoder = Decoder(config, tensors, backend, 32, 32, self.experts)
        self.experts.end_loading()
        self.whole = Decoder(config, tensors, CudaBackend(DEVICE), 32, 32)
        self.cache, self.other = (KVCache.allocate(config, 32, DEVICE) for _ in range(2))
        for layer in (*self.cache.layers, *self.other.layers):
            for tensor in layer.tensors:
                tensor.zero_()
        self.graphs = CudaGraphs(decoder, self.cache, 2, capture=capture_step if ON_GPU else self.again)

    def again(self, warm: Callable[[], Tensor], step: Callable[[], Tensor], _pool: Any) -> CapturedStep:
        warm()
        with pytest.MonkeyPatch.context() as without_sums:
            without_sums.setattr(split_experts, "add_sums", lambda total, *_: total)
            without_sums.setattr(self.graphs, "_run", self.graphs.run_padding)  # a capture changes nothing
            logits = step().clone()
        for counts in (self.experts.exchange.counts, self.experts.exchange.launches):
            counts.zero_()
        return CapturedStep(Again(step, logits), logits, 0)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    if not ON_GPU:
        for module in (cuda_backend, cuda_graphs):
            monkeypatch.setattr(module, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    return Rig()


@pytest.mark.cuda_kernel
@pytest.mark.parametrize("rows", [1, 2])
def test_a_replay_gives_what_the_step_gives_eagerly(rig: Rig, rows: int) -> None:
    key = decode_key(rows, GREEDY)
    expected = rig.graphs.run_padding(key).clone()
    step = rig.graphs.capture(key)
    for _ in range(3):
        step.graph.replay()
        if ON_GPU:
            torch.cuda.synchronize()
        assert torch.equal(step.logits, expected)


@pytest.mark.cuda_kernel
def test_tokens_are_those_of_a_model_that_is_on_the_device(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and greedy steps, between which experts take the places of others, and teacher-forced ones."""
    monkeypatch.setattr(replacing, "LOOK_AFTER", 2)
    params = SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)
    split = ModelRunner(rig.graphs.decoder, rig.cache, rig.graphs, DeviceDecoder(rig.graphs))
    texts, forced = list[list[int]](), list[Tensor]()
    for runner in (ModelRunner(rig.whole, rig.other), split):
        sampler = Sampler(params, rig.whole.config.vocab_size)
        one = Sequence([5, 17, 50], params, sampler, TextStream(lambda _: b""), frozenset(), 32)
        one.block_tables = ([1],)
        with_slots([one])
        (first,) = runner.launch(
            StepPlan.prefill([one], [SequenceRows([5, 17, 50], 0, one.block_tables)])
        ).results()
        one.num_cached_tokens = 3
        assert isinstance(first, Sample)
        one.token_ids.append(first.token)
        for _ in range(6):
            (sample,) = decode(runner, [one])
            assert isinstance(sample, Sample)
            one.num_cached_tokens += 1
            one.token_ids.append(sample.token)
        texts.append(one.token_ids)
        forced.append(runner.logits(texts[0], 0, "decode"))
    torch.testing.assert_close(forced[1], forced[0], rtol=1e-3, atol=1e-3)
    assert texts[0] == texts[1] and rig.experts.counts.device_uses + rig.experts.counts.host_uses > 0
    split.release()
    assert int(rig.experts.exchange.stopped) == 1


def test_prompts_are_not_captured(rig: Rig) -> None:
    assert {key.phase for key in rig.graphs.keys} == {"decode"}
    assert rig.graphs._captures(GraphKey("prefill", 16, 1)) is False
