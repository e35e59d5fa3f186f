"""Steps that draft, verify and accept on a device: tokens and states are those of plain decode steps.

Without a GPU a "graph" is the step itself, run again in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import decode_batch
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.draft_decoder import DraftDecoder
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.sampling_params import SamplingParams
from quengine.runners import cuda_graphs, draft_graphs
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.draft_graphs import DraftedSequence, DraftGraphs
from quengine.runners.graph_capture import CapturedStep, capture_step
from quengine.runners.graph_keys import GREEDY, SamplingKind
from quengine.sampler import Result, Sample, Sampler, Verified
from quengine.slot import Slot
from quengine.step_plan import verified
from tests.engine.runners.test_cuda_graphs import DEVICE, ON_GPU, Again
from tests.engine.speculative.test_draft_mtp import SIZES

CTX, MOST = 64, 2
PARAMS = {
    GREEDY: SamplingParams(temperature=0, seed=1),
    SamplingKind(64, bias=True, penalties=False): SamplingParams(
        seed=3, top_k=20, logit_bias={9: 1.5, 400: 1.0}
    ),
}
ON_GPU_ALONE = pytest.mark.skipif(not ON_GPU, reason="the interpreter takes long")
STARTS = [5, 9]
TABLES = [[[1, 2], [1]], [[4, 3], [2]]]
"""Of each sequence, the blocks of attention and of states."""


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        for module in (cuda_backend, cuda_graphs, draft_graphs):
            monkeypatch.setattr(module, "has_dependent_launch", lambda _device: False)
        monkeypatch.setattr(torch.cuda, "Event", MagicMock())


def again(warm: Callable[[], Tensor], step: Callable[[], Tensor], _pool: Any) -> CapturedStep:
    results = warm()
    return CapturedStep(Again(step, results), results, 0)


class Rig:
    """A tiny model with its own layer, whose rows have the same bits in whatever step they are; and its graphs."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        config, capture = checkpoint.config, capture_step if ON_GPU else again
        backend = CudaBackend(DEVICE, batch_invariant=True)
        pools = [CachePool(4), CachePool(2, is_state=True)]
        self.cache, self.other = (
            KVCache.allocate(config, CTX, DEVICE, pools=pools, keeps_hidden=True) for _ in range(2)
        )
        self.decoder = Decoder(config, checkpoint.tensors, backend, CTX, CTX)
        self.decoder.kept = self.cache.hidden
        layer = DraftLayer(checkpoint)
        drafter = DraftDecoder(layer.config, layer.tensors, self.decoder, CTX)
        own = KVCache.allocate(layer.config, CTX, DEVICE, pools=pools[:1])
        self.target = CudaGraphs(self.decoder, self.cache, 8, 16, True, capture=capture, slots=2)
        self.drafts = DraftGraphs(self.target, drafter, own.layers, MOST, 8, capture)
        for slot, tables in enumerate(TABLES):
            for group, blocks in enumerate(tables):
                self.target.inputs.extend(slot, group, 0, blocks)
        self.slots = [Slot(0), Slot(1)]

    def alone(self, number: int, sampler: Sampler, count: int) -> list[int]:
        """The first token of a sequence and the `count` tokens after it, by a plain step each."""
        ids = [STARTS[number]]
        for position in range(count):
            batch = decode_batch([ids[-1]], [position], [TABLES[number]], DEVICE, shares_sequences=True)
            logits = self.decoder.forward(batch, self.other.layers)[0]
            ids.append(sampler.sample(logits.float().cpu(), ids, len(ids)).token)
        return ids

    def configure(self, kind: SamplingKind, samplers: list[Sampler]) -> None:
        for slot, sampler in zip(self.slots, samplers, strict=True):
            self.target.configure(slot.index, kind, sampler.params, sampler, [])
            self.drafts.configure(slot, kind, sampler.params, sampler)

    def right(self, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the layer draft the tokens of these texts, but for every third."""
        draft, history = self.drafts._draft, self.drafts._drafted.history
        wanted = torch.full(history.shape, -1, dtype=history.dtype)
        for slot, ids in enumerate(texts):
            for position in (at for at in range(1, len(ids)) if at % 3):
                wanted[slot, position] = ids[position]
        wanted = wanted.to(history.device)  # ahead of a capture

        def drafted(*args: Any) -> None:
            draft(*args)
            history.copy_(torch.where(wanted >= 0, wanted, history))

        monkeypatch.setattr(self.drafts, "_draft", drafted)


def read(launched: tuple[Any, ...]) -> list[int]:
    """The tokens of a step."""
    tokens, arrived, *_ = launched
    arrived.synchronize()
    return list(tokens.tolist())


def accepted(result: Result) -> list[int]:
    """The tokens that a step adds."""
    if isinstance(result, Sample):
        return [result.token]
    assert isinstance(result, Verified) and result.draft is not None
    new = [result.first]
    while len(new) <= len(result.draft) and new[-1].token == result.draft[len(new) - 1]:
        later = result.later(len(new))
        assert isinstance(later, Sample)
        new.append(later)
    return [sample.token for sample in new]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        **SIZES,
        "quant": "Q8_0",
        "embedding_length": 32,
        "feed_forward_length": 32,
        "context_length": CTX,
    }
    small = replace(PRESETS["qwen3.5-mtp-tiny"], **sizes)  # type: ignore[arg-type]
    return write_synthetic(tmp_path_factory.mktemp("drafts") / "tiny.gguf", small)


@pytest.mark.cuda_kernel
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == GREEDY else ON_GPU_ALONE, id=str(kind.top_k)) for kind in PARAMS],
)
def test_tokens_are_those_of_plain_steps(
    path: Path, kind: SamplingKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence alone, then two, then with a plain step between; drafts are right but for every third token."""
    rig = Rig(path)
    samplers = [Sampler(PARAMS[kind], 500, stream) for stream in (0, 1)]
    wanted = [rig.alone(number, sampler, 9 - 3 * number) for number, sampler in enumerate(samplers)]
    rig.configure(kind, samplers)
    rig.right(wanted, monkeypatch)
    texts, added = [[token] for token in STARTS], list[int]()

    def step(sequences: list[DraftedSequence]) -> None:
        tokens = read(rig.drafts.launch(kind, sequences, MOST))
        for number, sequence in enumerate(sequences):
            new = accepted(verified(tokens[number * (2 * MOST + 1) :][: 2 * MOST + 1]))
            texts[sequence.slot] += new
            added.append(len(new))

    step([DraftedSequence(0, MOST, 64, 0, STARTS[:1])])
    step([DraftedSequence(1, 1, 64, 0, STARTS[1:]), DraftedSequence(0, MOST, 64)])
    texts[0].append(read(rig.target.launch([Slot(0)], {}, kind))[0])
    step([DraftedSequence(0, MOST, 64), DraftedSequence(1, MOST, len(texts[1]) + 1)])
    for ids, expected in zip(texts, wanted, strict=True):
        assert ids == expected[: len(ids)]
    assert set(added) >= {1, 3} and len(texts[0]) >= 7
    newest = [rig.target.inputs.of_slots.positions[slot].item() for slot in (0, 1)]
    assert newest == [len(ids) - 1 for ids in texts]
