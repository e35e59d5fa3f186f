"""The CUDA backend's steps on two ranks that are threads, on a GPU or in Triton's interpreter: the tokens of one.

A "graph" is the step itself, run again.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.lora.backend import AdaptedCuda
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.lora.change import LowRank
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kv_cache import KVCache
from quengine.loading.open_adapters import adapters_of
from quengine.model_runner import ModelRunner
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import Stage
from quengine.models.decoder import Decoder
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank
from quengine.parallel import cached_rows
from quengine.parallel.cached_rows import read_cached, write_cached
from quengine.parallel.steps import run
from quengine.request.adapter_scales import Scales
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.runners import cuda_graphs, graph_keys, static_inputs
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_capture import CapturedStep
from quengine.runners.graph_keys import GREEDY, decode_key
from quengine.sampler import Sample, Sampler
from quengine.step_plan import GivenRows, SequenceRows, StepPlan, forward_batch
from tests.engine.parallel.rank_threads import Meeting, ThreadCommunicator, ThreadGroup
from tests.engine.steps import decode, with_slots
from tests.gguf_builder import ModelSizes
from tests.models.adapters import random_adapters
from tests.tiny_models import write_tiny

ON_GPU = torch.cuda.is_available()
DEVICE, CTX = torch.device("cuda" if ON_GPU else "cpu"), 96
TABLES = [[2, 1]]

pytestmark = [pytest.mark.cuda_kernel, pytest.mark.timeout(600)]  # a first run on a GPU compiles the kernels


class Again:
    """A step, run again."""

    def __init__(self, step: Callable[[], Tensor], logits: Tensor) -> None:
        self.step, self.logits = step, logits

    def replay(self) -> None:
        logits = self.step()
        self.logits[: len(logits)] = logits


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CAPTURED_AT", 1)
    if ON_GPU:
        return
    for module in (cuda_backend, cuda_graphs):
        monkeypatch.setattr(module, "has_dependent_launch", lambda _device: False)
    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    for module in (graph_keys, static_inputs):  # the interpreter takes long for rows
        monkeypatch.setattr(module, "PREFILL_ROWS", (8,))
        monkeypatch.setattr(module, "PREFILL_SEQUENCES", (1, 2))


def write_model(folder: Path, architecture: str, blocks: int = 1) -> Path:
    sizes = ModelSizes(
        architecture,
        blocks=blocks,
        embedding=32,
        feed_forward=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        expert_feed_forward=64,
        shared_feed_forward=64,
    )
    return write_tiny(folder / "m.gguf", kind="Q8_0", sizes=sizes)


def runner_of(
    path: Path,
    communicator: Communicator = ONE_RANK,
    by_expert: bool = False,
    stage: Stage | None = None,
    lora: Seq[Mapping[str, LowRank]] = (),
) -> ModelRunner:
    """`stage`: the ranks have whole layers. lora: the changes of adapters."""
    checkpoint = open_checkpoint(path)
    if stage is not None:
        checkpoint = SplitCheckpoint(checkpoint, stage)
    elif communicator.size > 1:
        checkpoint = SplitCheckpoint(checkpoint, Rank(communicator.rank, communicator.size, by_expert))
    if isinstance(checkpoint, SplitCheckpoint):
        lora = [checkpoint.changes(each) for each in lora]
    backend = AdaptedCuda(adapters_of(checkpoint, lora), DEVICE) if lora else CudaBackend(DEVICE)
    backend.communicator = communicator
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CTX, CTX)
    cache = KVCache.allocate(checkpoint.config, CTX, DEVICE, pools=[CachePool(5)])
    for tensor in (tensor for layer in cache.layers for tensor in layer.tensors):
        tensor.zero_()

    def again(_warm: Callable[[], Tensor], step: Callable[[], Tensor], _pool: Any) -> CapturedStep:
        logits = torch.empty(4, decoder.config.vocab_size, device=DEVICE)
        return CapturedStep(Again(step, logits), logits, 0)

    graphs = CudaGraphs(decoder, cache, 2, capture=again)
    return ModelRunner(decoder, cache, graphs, DeviceDecoder(graphs))


def tokens_of(runner: ModelRunner, params: SamplingParams, scales: Scales | None = None) -> list[int]:
    """A prompt of three tokens and those that follow it, the first with the prompt and others in captured steps."""
    sampler = Sampler(params, runner.decoder.config.vocab_size)
    stream = TextStream(lambda _: b"")
    sequence = Sequence([5, 6, 7], params, sampler, stream, frozenset(), CTX, adapters=scales)
    sequence.block_tables = tuple(TABLES)
    with_slots([sequence])
    prompt = runner.launch(StepPlan.prefill([sequence], [SequenceRows([5, 6, 7], 0, TABLES, None, scales)]))
    for number in range(3):
        (result,) = decode(runner, [sequence]) if number else prompt.results()
        assert isinstance(result, Sample)
        sequence.num_cached_tokens = 3 + number
        sequence.token_ids.append(result.token)
    return sequence.token_ids


def test_two_ranks_take_rows_given_as_embeddings(tmp_path: Path) -> None:
    """The first has them, and the others get them by broadcast."""
    path, whole = write_model(tmp_path, "qwen2"), [5, 6, 7, 8]
    alone = runner_of(path)
    batch = forward_batch("prefill", [SequenceRows(whole, 0, TABLES)], DEVICE)
    values = alone.decoder.backend.embed(batch, alone.decoder.token_embd)
    meeting, given = Meeting(2), GivenRows([1, 2], values[1:3])
    leader, follower = (runner_of(path, ThreadCommunicator(rank, meeting)) for rank in range(2))
    group: Any = ThreadGroup(meeting, partial(run, follower))
    leader.lead(group)
    try:
        wanted = leader.forward("prefill", [SequenceRows(whole, 0, TABLES)], all_logits=True).clone()
        rows = [SequenceRows([5, 0, 0, 8], 0, TABLES)]
        assert torch.equal(leader.forward("prefill", rows, all_logits=True, given=given), wanted)
        assert not torch.equal(leader.forward("prefill", rows, all_logits=True), wanted)
    finally:
        group.end()


@pytest.mark.parametrize(
    ("architecture", "by_expert", "params"),
    [
        ("qwen2moe", False, SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)),
        ("qwen2moe", True, SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)),
        ("openelm", False, SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)),
        ("cohere2", False, SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)),
        (
            "qwen2",
            False,
            SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, max_tokens=8, logit_bias={9: 2.0}),
        ),
    ],
    ids=["greedy", "by expert", "layers of unlike heads", "side by side", "sampled"],
)
def test_two_ranks_choose_the_tokens_of_one(
    tmp_path: Path,
    architecture: str,
    by_expert: bool,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_model(tmp_path, architecture, blocks=2 if architecture == "openelm" else 1)
    one = runner_of(path)
    wanted = tokens_of(one, params)
    meeting = Meeting(2)
    leader, follower = (runner_of(path, ThreadCommunicator(rank, meeting), by_expert) for rank in range(2))
    group: Any = ThreadGroup(meeting, partial(run, follower))
    leader.lead(group)
    try:
        assert tokens_of(leader, params) == wanted
        stored = read_cached(leader, 0, 4, one.decoder.config)
        for mine, whole in zip(stored, read_cached(one, 0, 4, one.decoder.config), strict=True):
            torch.testing.assert_close(mine, whole, rtol=2e-3, atol=2e-3)
        write_cached(leader, 0, 4, [rows + 1 for rows in stored])
        again = read_cached(leader, 0, 4, one.decoder.config)
        assert all(torch.equal(a, b + 1) for a, b in zip(again, stored, strict=True))
        monkeypatch.setattr(cached_rows, "_MOST_BYTES", 1)  # one tensor at a time, where it was all at once
        write_cached(leader, 0, 4, stored)
        assert all(map(torch.equal, read_cached(leader, 0, 4, one.decoder.config), stored))
    finally:
        group.end()
    a, b = leader.graphs, follower.graphs
    assert isinstance(a, CudaGraphs) and isinstance(b, CudaGraphs)
    assert a.inputs.all.equal(b.inputs.all) and a.captured == b.captured


def test_teacher_forced_decode_steps_are_the_captured_ones(tmp_path: Path) -> None:
    """The logits are those of steps whose operations run one by one, with adapters and on two ranks too, and a request
    after them has its own tokens and no adapter. The rows begin in one block and end in the next."""
    path, ids, start, scales = write_model(tmp_path, "qwen2"), [5, 6, 7, 8], BLOCK_SIZE - 2, (1.0,)
    made = random_adapters(open_checkpoint(path).tensors, ("attn_q", "ffn_down"), (4,)).changes
    lora = [{name: each[0] for name, each in made.items() if each[0] is not None}]
    params = SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)
    one, meeting = runner_of(path, lora=lora), Meeting(2)
    wanted = tokens_of(one, params)
    assert isinstance(one.graphs, CudaGraphs)
    before, whole = one.graphs.captured, one.cache.whole_tables
    rows = [[SequenceRows([token], at, whole)] for at, token in enumerate(ids, start)]
    plain = one.logits(ids, start, "decode")
    assert decode_key(1, GREEDY) in before and one.graphs.captured == before
    assert plain.equal(torch.cat([one.forward("decode", row, eager=True).cpu().clone() for row in rows]))
    one.adapters = scales
    assert not one.logits(ids, start, "decode").isclose(plain, rtol=0, atol=1e-3).all()
    assert tokens_of(one, params) == wanted
    leader, follower = (runner_of(path, ThreadCommunicator(rank, meeting), lora=lora) for rank in range(2))
    group: Any = ThreadGroup(meeting, partial(run, follower))
    leader.lead(group)
    try:
        torch.testing.assert_close(leader.logits(ids, start, "decode"), plain, rtol=2e-3, atol=2e-3)
        assert tokens_of(leader, params) == wanted
    finally:
        group.end()


def test_two_ranks_have_their_parts_of_adapters(tmp_path: Path) -> None:
    """Of each layer, or of layers of their own. Scales that a slot has go to the other rank, and those of the sequence
    before it do too."""
    path = write_model(tmp_path, "qwen2", blocks=2)
    stems = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
    made = random_adapters(open_checkpoint(path).tensors, stems, (4, 3)).changes
    lora = [{name: each[n] for name, each in made.items() if each[n] is not None} for n in range(2)]
    params = SamplingParams(temperature=0, seed=1, max_tokens=8, ignore_eos=True)
    one = runner_of(path, lora=lora)
    wanted = [tokens_of(one, params, scales) for scales in ((1.0, 0.0), (-0.5, 1.0), None)]
    for stages in ([None, None], [Stage(rank, (0, 1, 2)) for rank in range(2)]):
        meeting = Meeting(2)
        leader, follower = (
            runner_of(path, ThreadCommunicator(rank, meeting), stage=stages[rank], lora=lora)
            for rank in range(2)
        )
        group: Any = ThreadGroup(meeting, partial(run, follower))
        leader.lead(group)
        try:
            for scales, tokens in zip(((1.0, 0.0), (-0.5, 1.0), None), wanted, strict=True):
                assert tokens_of(leader, params, scales) == tokens
        finally:
            group.end()
    assert wanted[0] != wanted[2]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen2moe", "cohere2"])
def test_two_ranks_that_share_the_layers_choose_the_tokens_of_one(tmp_path: Path, architecture: str) -> None:
    """And have the same bits: a row goes to the next rank with the norm that the launch before has begun."""
    path = write_model(tmp_path, architecture, blocks=2)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=8, ignore_eos=True)
    one = runner_of(path)
    wanted, meeting = tokens_of(one, params), Meeting(2)
    leader, follower = (
        runner_of(path, ThreadCommunicator(rank, meeting), stage=Stage(rank, (0, 1, 2))) for rank in range(2)
    )
    group: Any = ThreadGroup(meeting, partial(run, follower))
    leader.lead(group)
    try:
        assert tokens_of(leader, params) == wanted
        stored, of_one = (read_cached(runner, 0, 5, one.decoder.config) for runner in (leader, one))
    finally:
        group.end()
    assert len(stored) == 4 and all(map(torch.equal, stored, of_one))
    a, b = leader.graphs, follower.graphs
    assert isinstance(a, CudaGraphs) and isinstance(b, CudaGraphs)
    assert a.inputs.all.equal(b.inputs.all) and a.captured == b.captured
